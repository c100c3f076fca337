#!/usr/bin/env python3
"""Which libraries a binary links, as a software bill of materials: scripts/sbom.py build/cpu/train_gpt >sbom.json (make sbom)

CycloneDX 1.5. Libraries are those that the binary names (readelf); their versions are those of the headers it was compiled with
on this machine, as the compiler sees them. The same binary and headers give the same bytes: no date, no serial number. A library
that has no row below ends with an error, so that the table is kept complete.
"""
import glob
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

# Beginning of the file's name, component, licence (SPDX), header, and what in it is the version. 13020 as one number: 13.2.0.
GCC = ("", "__GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__")
GLIBC = ("features.h", "__GLIBC__ __GLIBC_MINOR__")
LIBRARIES = [
    ("libmpi.", "Open MPI", "BSD-3-Clause", "mpi.h", "OMPI_MAJOR_VERSION OMPI_MINOR_VERSION OMPI_RELEASE_VERSION"),
    ("libmpich.", "MPICH", "mpich2", "mpi.h", "MPICH_VERSION"),
    ("libnccl.", "NCCL", "Apache-2.0", "nccl.h", "NCCL_MAJOR NCCL_MINOR NCCL_PATCH"),
    ("libcublasLt.", "cuBLASLt", None, "cublas_api.h", "CUBLAS_VER_MAJOR CUBLAS_VER_MINOR CUBLAS_VER_PATCH"),
    ("libcudart.", "CUDA runtime", None, "cuda_runtime_api.h", "CUDART_VERSION"),
    ("libgomp.", "GNU libgomp", "GPL-3.0-or-later WITH GCC-exception-3.1", *GCC),
    ("libstdc++.", "GNU libstdc++", "GPL-3.0-or-later WITH GCC-exception-3.1", *GCC),
    ("libgcc_s.", "GNU libgcc", "GPL-3.0-or-later WITH GCC-exception-3.1", *GCC),
    ("libasan.", "AddressSanitizer", "Apache-2.0 WITH LLVM-exception", *GCC),
    ("libubsan.", "UndefinedBehaviorSanitizer", "Apache-2.0 WITH LLVM-exception", *GCC),
    ("libc.", "GNU C library", "LGPL-2.1-or-later", *GLIBC),
    ("libm.", "GNU C library, mathematics", "LGPL-2.1-or-later", *GLIBC),
    ("libpthread.", "GNU C library, threads", "LGPL-2.1-or-later", *GLIBC),
    ("ld-linux", "GNU C library, loader", "LGPL-2.1-or-later", *GLIBC),
]


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout


def include_flags():
    folders = [f"-I{path}" for path in glob.glob(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"))]
    try:
        return folders + output(os.environ.get("MPICC", "mpicc"), "--showme:compile").split()
    except (OSError, subprocess.CalledProcessError):
        return folders


def header_version(header, macros):
    """The macros' values, joined by points."""
    source = (f"#include <{header}>\n" if header else "") + "".join(f"version:{macro}\n" for macro in macros.split())
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    result = subprocess.run(compiler + include_flags() + ["-DOMPI_SKIP_MPICXX", "-x", "c++", "-E", "-P", "-"], input=source, capture_output=True, text=True)
    values = re.findall(r'^version:\s*"?([0-9][0-9.]*)"?\s*$', result.stdout, re.M)
    if result.returncode != 0 or len(values) != len(macros.split()):
        sys.exit(f"error: the version of {header or 'the compiler'} ({macros}) cannot be found; run this where the binary was built")
    if macros == "CUDART_VERSION":
        values = [str(int(values[0]) // 1000), str(int(values[0]) % 1000 // 10)]
    return ".".join(values)


def component(file, linkage):
    for prefix, name, licence, header, macros in LIBRARIES:
        if file.startswith(prefix):
            entry = {"type": "library", "name": name, "version": header_version(header, macros)}
            # CUDA's libraries come under NVIDIA's own terms, which have no SPDX name.
            entry["licenses"] = [{"expression": licence}] if licence else [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}]
            entry["properties"] = [{"name": "file", "value": file}, {"name": "linkage", "value": linkage}]
            return entry
    sys.exit(f"error: {file} is linked, and scripts/sbom.py does not know it; add a row to its table")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/sbom.py BINARY")
    binary = sys.argv[1]
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", output("readelf", "-d", binary))
    parts = [component(file, "dynamic") for file in needed]
    # OpenMP's library is linked in whole: its functions are the binary's own then.
    if re.search(r"FUNC +GLOBAL +DEFAULT +[0-9]+ GOMP_parallel$", output("readelf", "-Ws", binary), re.M):
        parts.append(component("libgomp.a", "static"))
    version = re.search(r'train_gpt ([0-9][0-9.]*)', output(binary, "--version"))
    with open(binary, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    program = {"type": "application", "name": "train_gpt", "version": version.group(1) if version else "", "licenses": [{"license": {"id": "MIT"}}],
               "hashes": [{"alg": "SHA-256", "content": digest}]}
    json.dump({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": program}, "components": parts}, sys.stdout, indent=2)
    print()


main()
