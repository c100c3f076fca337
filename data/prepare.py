#!/usr/bin/env python3
"""prepare.py - makes token shards for train_gpt from local files or from well-known public text.

    prepare.py book.txt notes/ dump.jsonl --out data/mine             bytes, vocabulary 256
    prepare.py book.txt --tokenizer gpt2 --out data/mine              GPT-2's tokens (needs: pip install tiktoken)
    prepare.py book.txt --tokenizer path/tokenizer.json --out ...     any Hugging Face tokenizer (needs: pip install tokenizers)
    prepare.py tinyshakespeare | tinystories | fineweb | fineweb-edu | openwebtext [--out data/NAME] [--max-tokens N]

Writes NAME_train_000000.bin, ... and NAME_val_000000.bin in llm.c's format (16-bit tokens, or 32-bit ones for vocabularies over
65536), tokenizer.bin (the byte string of each token, for printing samples; none is needed for bytes) and dataset.json
(what was done). Files appear under their names only when they are complete; dataset.json comes last.

Documents are a .txt file each, a line each of .jsonl (the text under --text-field), or a row each of .parquet (needs: pip install
pyarrow). In front of each document stands the tokenizer's end-of-text token, as in llm.c; with bytes, which have none, documents
are joined by an empty line. The first tokens go to validation, up to --val-fraction of all (estimated, when the input is large).

Only Python's standard library is needed unless the text above says so.
"""
import argparse
import array
import collections
import itertools
import json
import multiprocessing
import os
import re
import shutil
import stat
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

HEADER_WORDS = 256
MAGIC_16, VERSION_16 = 20240520, 1
MAGIC_32, VERSION_32 = 20240801, 7
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2

HUGGING_FACE = "https://huggingface.co"


def fail(message):
    """One line for the user; control bytes of names are shown, not sent to the terminal."""
    sys.stdout.flush()
    sys.exit("error: " + "".join(c if c.isprintable() else "\\x%02x" % ord(c) for c in message))


def need(module, package=None):
    """An optional package, or one line that says how to get it."""
    try:
        return __import__(module)
    except ImportError:
        fail("this needs the Python package %s: pip install %s" % (module, package or module))


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers. Each has: vocab_size; end_of_text (-1 = none); encode(text) -> list of tokens; strings() -> list of bytes, or None when
# train_gpt needs no file; spec, from which a worker process can make its own.

class Bytes:
    name, vocab_size, end_of_text = "bytes", 256, -1

    def encode(self, text):
        return text.encode("utf-8", "surrogateescape")

    def strings(self):
        return None


class Gpt2:
    name, vocab_size, end_of_text = "gpt2", 50257, 50256

    def __init__(self):
        tiktoken = need("tiktoken")
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as e:  # it downloads its ranks on first use, and raises whatever its HTTP client raises
            fail("tiktoken cannot load the GPT-2 vocabulary (%s); it downloads it once: run this where the network is, or set TIKTOKEN_CACHE_DIR to a folder that has it" % one_line(e))

    def encode(self, text):
        return self.encoding.encode_ordinary(clean(text))

    def strings(self):
        return [self.encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]


def byte_alphabet():
    """Character -> byte of byte-level BPE files: printable bytes stand for themselves, the others for U+0100, U+0101, ..."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


class HuggingFace:
    def __init__(self, path):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our processes are the parallelism
        tokenizers = need("tokenizers")
        self.name, self.path = path, path
        check_regular(path)
        try:
            with open(path, encoding="utf-8") as f:
                self.definition = json.load(f)
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except OSError as e:
            fail("%s: %s" % (path, e.strerror))
        except Exception as e:  # ValueError of json, and a bare Exception of tokenizers
            fail("%s: not a tokenizer.json that the tokenizers package reads (%s)" % (path, one_line(e)))
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size < 1:
            fail("%s: has no tokens" % path)
        self.end_of_text = -1
        for name in ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<|im_end|>"):
            if self.tokenizer.token_to_id(name) is not None:
                self.end_of_text = self.tokenizer.token_to_id(name)
                break

    def encode(self, text):
        return self.tokenizer.encode(clean(text), add_special_tokens=False).ids

    def strings(self):
        added = {t["id"]: t["content"] for t in self.definition.get("added_tokens", [])}
        byte_level = '"ByteLevel"' in json.dumps([self.definition.get("decoder"), self.definition.get("pre_tokenizer")])
        alphabet, strings = byte_alphabet(), []
        for i in range(self.vocab_size):
            token = self.tokenizer.id_to_token(i)
            if token is None:
                strings.append(b"")  # a gap in the numbers
            elif i in added:
                strings.append(added[i].encode("utf-8"))
            elif byte_level and all(c in alphabet for c in token):
                strings.append(bytes(alphabet[c] for c in token))
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                strings.append(bytes([int(token[3:5], 16)]))  # byte fallback
            else:
                strings.append(token.replace("\u2581", " ").encode("utf-8"))  # SentencePiece's visible blank
        return strings


def make_tokenizer(name):
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return Gpt2()
    if name.endswith(".json"):
        return HuggingFace(name)
    if os.path.isdir(name):
        return HuggingFace(os.path.join(name, "tokenizer.json"))
    fail("--tokenizer %s: must be bytes, gpt2, or the path of a tokenizer.json" % name)


def clean(text):
    """Half surrogates (of JSON escapes, or standing for bytes that were not UTF-8) become U+FFFD: no tokenizer can say them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def one_line(e):
    return " ".join(str(e).split())[:160] or type(e).__name__


# ---------------------------------------------------------------------------------------------------------------
# Documents of local files

def check_regular(path):
    """Refuses what is no regular file before opening it: a FIFO would block, a device never ends."""
    try:
        mode = os.stat(path).st_mode
    except OSError as e:
        fail("%s: %s" % (path, e.strerror))
    if not stat.S_ISREG(mode):
        fail("%s: is not a regular file" % path)


def list_inputs(paths):
    """All input files: folders are walked in the order of names, and only for the kinds of file that we read."""
    kinds, found = (".txt", ".jsonl", ".parquet"), []
    for path in paths:
        if os.path.isdir(path):
            before = len(found)
            for folder, folders, files in os.walk(path):
                folders.sort()
                found += [os.path.join(folder, f) for f in sorted(files) if f.endswith(kinds)]
            if len(found) == before:
                fail("%s: no .txt, .jsonl or .parquet file in this folder" % path)
        else:
            check_regular(path)
            if not path.endswith(kinds):
                fail("%s: must be a .txt, .jsonl or .parquet file, or a folder of such files" % path)
            found.append(path)
    return found


TEXT_PIECE = 1 << 24  # characters of a large text that are tokenized at once


def documents(path, field):
    """Yields (text, is the start of a document). Only .txt comes in pieces, cut at ends of lines."""
    check_regular(path)
    try:
        if path.endswith(".parquet"):
            need("pyarrow")
            import pyarrow.parquet
            file = pyarrow.parquet.ParquetFile(path)
            if field not in file.schema_arrow.names:
                fail("%s: has no column %r; its columns are %s (--text-field)" % (path, field, ", ".join(file.schema_arrow.names)))
            for batch in file.iter_batches(columns=[field], batch_size=1024):
                for text in batch.column(0).to_pylist():
                    if text:
                        yield text, True
            return
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
            if path.endswith(".txt"):
                rest, first = "", True
                while True:
                    piece = f.read(TEXT_PIECE)
                    if not piece:
                        break
                    cut = piece.rfind("\n") + 1
                    if rest and cut == 0 and len(rest) < 4 * TEXT_PIECE:
                        rest += piece
                        continue
                    cut = cut or len(piece)
                    yield rest + piece[:cut], first
                    rest, first = piece[cut:], False
                if rest:
                    yield rest, first
                return
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as e:
                    fail("%s:%d: not JSON: %s" % (path, number, one_line(e)))
                if not isinstance(row, dict) or not isinstance(row.get(field), str):
                    fail("%s:%d: no text under %r (--text-field)" % (path, number, field))
                if row[field]:
                    yield clean(row[field]), True
    except OSError as e:
        fail("%s: %s" % (path, e.strerror or one_line(e)))
    except Exception as e:
        if type(e).__module__.startswith("pyarrow"):
            fail("%s: not a readable parquet file: %s" % (path, one_line(e)))
        raise


# ---------------------------------------------------------------------------------------------------------------
# Downloads

def open_url(url, start=0):
    request = urllib.request.Request(url, headers={"User-Agent": "train_gpt-prepare", **({"Range": "bytes=%d-" % start} if start else {})})
    token = os.environ.get("HF_TOKEN")
    if token and urllib.parse.urlsplit(url).hostname == "huggingface.co":
        request.add_unredirected_header("Authorization", "Bearer " + token)
    return urllib.request.urlopen(request, timeout=60)


def why_not(e):
    if isinstance(e, urllib.error.HTTPError):
        return "the server answered %d %s" % (e.code, e.reason)
    return one_line(getattr(e, "reason", e))


def download(url, path, progress):
    """Fetches a file, going on where an interrupted download stopped; it gets its name when its length is right."""
    if os.path.exists(path):
        return path
    part = path + ".part"
    for attempt in range(5):
        have = os.path.getsize(part) if os.path.exists(part) else 0
        try:
            with open_url(url, have) as answer:
                if have and answer.status != 206:
                    have = 0  # the server does not resume: from the start
                length = answer.headers.get("Content-Length")
                total = have + int(length) if length is not None else None
                check_space(path, (total or 0) - have)
                progress.begin(os.path.basename(path), total)
                with open(part, "ab" if have else "wb") as f:
                    while True:
                        block = answer.read(1 << 20)
                        if not block:
                            break
                        f.write(block)
                        have += len(block)
                        progress.show(have)
                progress.end()
            if total is None or have == total:
                os.replace(part, path)
                return path
            reason = "the connection ended after %d of %d bytes" % (have, total)
        except urllib.error.HTTPError as e:
            if e.code == 416 and have:
                os.remove(part)  # what we have is longer than the file: it was another one
                continue
            reason = why_not(e)
            if e.code in (401, 403, 404, 410):
                break
        except (urllib.error.URLError, OSError, ValueError) as e:
            if isinstance(e, OSError) and not isinstance(e, urllib.error.URLError) and e.filename:
                fail("%s: %s" % (e.filename, e.strerror))  # the disk's fault, not the network's
            reason = why_not(e)
            if attempt == 1 and have == 0:
                break  # nothing has ever come: no network here
        progress.end()
        time.sleep(min(8, 2 ** attempt))
    fail("cannot download %s: %s; with what has come so far kept, the same command goes on later, or bring the file to %s by other means" % (url, reason, path))


def check_space(path, n_bytes):
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    if n_bytes > free:
        fail("%s: needs %.1f GB, but the disk has %.1f GB left" % (path, n_bytes / 1e9, free / 1e9))


def list_hub_folder(repository, folder, progress):
    """Addresses of the parquet files in a folder of a Hugging Face data set, in the order of names."""
    url = "%s/api/datasets/%s/tree/main/%s" % (HUGGING_FACE, repository, folder)
    try:
        with open_url(url) as answer:
            entries = json.loads(answer.read(1 << 24))
        names = sorted(e["path"] for e in entries if e.get("type") == "file" and e["path"].endswith(".parquet"))
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fail("cannot list %s: %s" % (url, why_not(e)))
    if not names:
        fail("%s lists no parquet file; the data set may have moved" % url)
    return ["%s/datasets/%s/resolve/main/%s" % (HUGGING_FACE, repository, urllib.parse.quote(name)) for name in names]


STORIES = HUGGING_FACE + "/datasets/roneneldan/TinyStories/resolve/main/"

# name -> (default tokenizer, about how many bytes of text, list of (split or None, address) or a folder of parquet files on the hub).
# Files of split "val" are validation as a whole.
SOURCES = {
    "tinyshakespeare": ("bytes", 1115394, [(None, "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")]),
    "tinystories": ("gpt2", 1945000000, [("val", STORIES + "TinyStories-valid.txt"), ("train", STORIES + "TinyStories-train.txt")]),
    "fineweb": ("gpt2", 47e9, ("HuggingFaceFW/fineweb", "sample/10BT")),
    "fineweb-edu": ("gpt2", 45e9, ("HuggingFaceFW/fineweb-edu", "sample/10BT")),
    "openwebtext": ("gpt2", 39e9, ("Skylion007/openwebtext", "plain_text")),
}


def stories(path):
    """TinyStories' text files: stories end with a line <|endoftext|>."""
    check_regular(path)
    lines = []
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            if line.strip() == "<|endoftext|>":
                yield "".join(lines).strip(), True
                lines = []
            else:
                lines.append(line)
    if "".join(lines).strip():
        yield "".join(lines).strip(), True


def source_documents(name, cache, field, progress):
    """Yields (split or None, text, is the start of a document) of a public set; one file is on the way at a time."""
    files = SOURCES[name][2]
    if isinstance(files, tuple):
        need("pyarrow")
        files = [(None, url) for url in list_hub_folder(*files, progress)]
    os.makedirs(cache, exist_ok=True)
    for split, url in files:
        path = download(url, os.path.join(cache, urllib.parse.unquote(url.rsplit("/", 1)[1])), progress)
        for text, first in stories(path) if name == "tinystories" else documents(path, field):
            yield split, text, first


# ---------------------------------------------------------------------------------------------------------------
# Progress

class Progress:
    """One line that is rewritten on a terminal; on anything else, a line at the end only."""

    def __init__(self, out=sys.stderr):
        self.out, self.live, self.name = out, out.isatty(), ""

    def begin(self, name, total):
        self.name, self.total, self.start, self.last, self.done = name, total, time.monotonic(), 0.0, 0

    def show(self, done, note=""):
        now = time.monotonic()
        self.done = done
        if not self.live or not self.name or now - self.last < 0.1:
            return
        self.last = now
        rate = done / max(1e-9, now - self.start)
        if self.total:
            share = min(1.0, done / self.total)
            left = (self.total - done) / max(1e-9, rate)
            bar = "#" * int(24 * share) + "." * (24 - int(24 * share))
            text = "[%s] %3.0f%% %8.1f MB/s, %d:%02d left" % (bar, 100 * share, rate / 1e6, left // 60, left % 60)
        else:
            text = "%10.1f MB %8.1f MB/s" % (done / 1e6, rate / 1e6)
        self.out.write("\r%-28.28s %s %s\033[K" % (self.name, text, note))
        self.out.flush()

    def end(self, note=""):
        if not self.name:
            return
        seconds = time.monotonic() - self.start
        self.out.write("%s%-28.28s %.1f MB in %.1f s %s%s\n" % ("\r" if self.live else "", self.name, self.done / 1e6, seconds, note, "\033[K" if self.live else ""))
        self.out.flush()
        self.name = ""


# ---------------------------------------------------------------------------------------------------------------
# Shards

class ShardWriter:
    """Tokens of one split into files of at most shard_tokens; each is written beside its name and then renamed."""

    def __init__(self, folder, name, split, shard_tokens, vocab_size):
        self.folder, self.name, self.split, self.limit, self.vocab_size = folder, name, split, shard_tokens, vocab_size
        self.code = "H" if vocab_size <= 65536 else "I"
        self.width = array.array(self.code).itemsize
        if (self.code, self.width) not in (("H", 2), ("I", 4)):
            fail("this Python's arrays have %d-byte tokens of type %s; 2 and 4 are needed" % (self.width, self.code))
        self.file, self.count, self.files = None, 0, []
        self.total = 0

    def raw(self, tokens):
        """Little-endian numbers of self.width bytes; bytes are widened without a Python object each."""
        if isinstance(tokens, bytes):
            raw = bytearray(self.width * len(tokens))
            raw[::self.width] = tokens
            return raw
        values = array.array(self.code, tokens)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    def path(self, number):
        return os.path.join(self.folder, "%s_%s_%06d.bin" % (self.name, self.split, number))

    def add(self, tokens):
        at = 0
        while at < len(tokens):
            if self.file is None:
                self.file = open(self.path(len(self.files)) + ".part", "wb")
                self.file.write(bytes(4 * HEADER_WORDS))
                self.count = 0
            take = min(len(tokens) - at, self.limit - self.count)
            self.file.write(self.raw(tokens[at:at + take]))
            self.count += take
            self.total += take
            at += take
            if self.count == self.limit:
                self.finish()

    def finish(self):
        if self.file is None:
            return
        magic, version = (MAGIC_16, VERSION_16) if self.width == 2 else (MAGIC_32, VERSION_32)
        self.file.seek(0)
        self.file.write(struct.pack("<4i", magic, version, self.count, self.vocab_size))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None
        path = self.path(len(self.files))
        os.replace(path + ".part", path)
        self.files.append({"file": os.path.basename(path), "tokens": self.count})


def write_tokenizer(path, strings, end_of_text):
    """llm.c's token-string file."""
    for i, s in enumerate(strings):
        if len(s) > 255:
            fail("token %d has %d bytes; the tokenizer file holds strings of at most 255" % (i, len(s)))
    with open(path + ".part", "wb") as f:
        f.write(struct.pack("<%di" % HEADER_WORDS, TOKENIZER_MAGIC, TOKENIZER_VERSION, len(strings), end_of_text, *[0] * (HEADER_WORDS - 4)))
        for s in strings:
            f.write(bytes([len(s)]) + s)
    os.replace(path + ".part", path)


def read_tokenizer(path):
    """The strings and the end-of-text token of such a file."""
    with open(path, "rb") as f:
        data = f.read()
    if len(data) < 4 * HEADER_WORDS:
        raise ValueError("too short")
    magic, version, n, end_of_text = struct.unpack_from("<4i", data)
    if magic != TOKENIZER_MAGIC or version != TOKENIZER_VERSION:
        raise ValueError("not a tokenizer file")
    strings, at = [], 4 * HEADER_WORDS
    for _ in range(n):
        if at >= len(data) or at + 1 + data[at] > len(data):
            raise ValueError("cut")
        strings.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    if at != len(data):
        raise ValueError("bytes behind the last token")
    return strings, end_of_text


def write_json(path, value):
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=True)
        f.write("\n")
    os.replace(path + ".part", path)


# ---------------------------------------------------------------------------------------------------------------
# Tokenizing, in one process or several

worker_tokenizer = None


def start_worker(name):
    global worker_tokenizer
    worker_tokenizer = make_tokenizer(name)


def encode_in_worker(batch):
    return [(split, first, text_bytes(text), worker_tokenizer.encode(text)) for split, text, first in batch]


def text_bytes(text):
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def batches(items, characters):
    """Lists of documents of about so many characters: one message between processes each."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += len(item[1])
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(items, tokenizer, tokenizer_name, processes):
    """Yields (split, is the start of a document, bytes, tokens) in the order of the documents."""
    if processes <= 1 or isinstance(tokenizer, Bytes):
        for split, text, first in items:
            yield split, first, text_bytes(text), tokenizer.encode(text)
        return
    with multiprocessing.Pool(processes, start_worker, (tokenizer_name,)) as pool:
        waiting = collections.deque()  # bounded: imap would read the whole input ahead of the slowest worker
        for batch in batches(items, 1 << 19):
            waiting.append(pool.apply_async(encode_in_worker, (batch,)))
            if len(waiting) > 3 * processes:
                yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()


def write_dataset(args, items, tokenizer, progress, expected_bytes):
    """Splits, writes, and returns what dataset.json says."""
    val = ShardWriter(args.out, args.name, "val", args.shard_tokens, tokenizer.vocab_size)
    train = ShardWriter(args.out, args.name, "train", args.shard_tokens, tokenizer.vocab_size)
    separator = [tokenizer.end_of_text] if tokenizer.end_of_text >= 0 else tokenizer.encode("\n\n")
    n_documents = n_bytes = 0
    total = None  # tokens expected, extrapolated from the bytes seen, to know how many are for validation
    held = []     # the first pieces, until there is enough to extrapolate
    progress.begin(args.name, expected_bytes)

    def place(split, tokens):
        at = 0
        if split is None:
            want = int(total * args.val_fraction) - val.total if total else 0
            at = max(0, min(want, len(tokens)))
            if at:
                val.add(tokens[:at])
        if split == "val":
            val.add(tokens)
        elif at < len(tokens):
            train.add(tokens[at:] if at else tokens)

    for split, first, size, tokens in encoded(items, tokenizer, args.tokenizer, args.processes):
        n_bytes += size
        if first:
            n_documents += 1
            if tokenizer.end_of_text >= 0:
                tokens = separator + list(tokens)
            elif n_documents > 1:
                tokens = bytes(separator) + tokens
        if total is None and split is None:
            held.append(tokens)
            if n_bytes < min(expected_bytes or 1 << 22, 1 << 22):
                continue
            so_far = sum(len(h) for h in held)
            total = so_far * max(1.0, (expected_bytes or n_bytes) / n_bytes)
            if args.max_tokens:
                total = min(total, args.max_tokens)
            for h in held:
                place(None, h)
            held = []
        else:
            place(split, tokens)
        progress.show(n_bytes, "%.1f M tokens" % ((train.total + val.total) / 1e6))
        if args.max_tokens and train.total + val.total >= args.max_tokens:
            break
    if held:
        total = sum(len(h) for h in held)
        for h in held:
            place(None, h)
    train.finish()
    val.finish()
    progress.done = n_bytes
    progress.end("-> %d tokens" % (train.total + val.total))
    return {"name": args.name, "tokenizer": tokenizer.name, "vocabulary": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text, "documents": n_documents,
            "bytes": n_bytes, "token_bytes": train.width, "train": {"tokens": train.total, "shards": train.files}, "val": {"tokens": val.total, "shards": val.files}}


# ---------------------------------------------------------------------------------------------------------------

def parse_arguments(argv):
    parser = argparse.ArgumentParser(description="Makes token shards for train_gpt from text.", epilog="Public sets: " + ", ".join(SOURCES) + ".")
    parser.add_argument("input", nargs="+", help=".txt, .jsonl and .parquet files, folders of them, or the name of one public set")
    parser.add_argument("--out", help="folder to write to (default data/NAME)")
    parser.add_argument("--name", help="beginning of the files' names (default: from the input)")
    parser.add_argument("--tokenizer", help="bytes, gpt2, or the path of a tokenizer.json (default bytes; gpt2 for the large public sets)")
    parser.add_argument("--val-fraction", type=float, default=0.01, help="share of the tokens for validation, 0 to 0.5 (default 0.01)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens of one shard at most (default 100000000)")
    parser.add_argument("--max-tokens", type=int, default=0, help="stop after about so many tokens (default: all)")
    parser.add_argument("--text-field", default="text", help="field or column that holds the text (default text)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that tokenize (default: one a core)")
    parser.add_argument("--overwrite", action="store_true", help="replace shards that are there")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction <= 0.5:
        fail("--val-fraction %g: must be from 0 to 0.5" % args.val_fraction)
    if not 1 <= args.shard_tokens < 1 << 31:
        fail("--shard-tokens %d: must be from 1 to 2147483647 (the header counts in 31 bits)" % args.shard_tokens)
    if args.max_tokens < 0 or args.processes < 1:
        fail("--max-tokens must not be negative, --processes must be at least 1")
    args.source = args.input[0] if len(args.input) == 1 and args.input[0] in SOURCES and not os.path.exists(args.input[0]) else None
    if not args.source:
        for path in args.input:
            if path in SOURCES and not os.path.exists(path):
                fail("%s: a public set is prepared alone; name it as the only input" % path)
    args.tokenizer = args.tokenizer or (SOURCES[args.source][0] if args.source else "bytes")
    if not args.name:
        base = args.source or os.path.basename(os.path.normpath(args.input[0]))
        args.name = "".join(c if c.isalnum() or c in "-_" else "_" for c in os.path.splitext(base)[0] or "data")
    if not args.name or "/" in args.name or args.name.startswith("."):
        fail("--name %s: must be a plain name" % args.name)
    args.out = args.out or os.path.join("data", args.name)
    return args


def main(argv=None):
    args = parse_arguments(argv)
    progress = Progress()
    files = None if args.source else list_inputs(args.input)
    tokenizer = make_tokenizer(args.tokenizer)
    try:
        os.makedirs(args.out, exist_ok=True)
        old = sorted(f for f in os.listdir(args.out) if f.startswith((args.name + "_train_", args.name + "_val_")) and f.endswith((".bin", ".bin.part")))
        if any(f.endswith(".bin") for f in old) and not args.overwrite:
            fail("%s: has shards of %s already (%s, ...); name another --out or --name, or give --overwrite" % (args.out, args.name, old[0]))
        for f in old + [f for f in ("dataset.json",) if os.path.exists(os.path.join(args.out, f))]:
            os.remove(os.path.join(args.out, f))
        if args.source:
            items = source_documents(args.source, os.path.join(args.out, "download"), args.text_field, progress)
            expected = int(SOURCES[args.source][1])
        else:
            items = ((None, text, first) for path in files for text, first in documents(path, args.text_field))
            expected = None if any(p.endswith(".parquet") for p in files) else sum(os.path.getsize(p) for p in files)
        first_item = next(items, None)
        if first_item is None:
            fail("%s: no text in the input" % args.input[0])
        report = write_dataset(args, itertools.chain([first_item], items), tokenizer, progress, expected)
        strings = tokenizer.strings()
        if strings is not None:
            write_tokenizer(os.path.join(args.out, "tokenizer.bin"), strings, tokenizer.end_of_text)
            report["tokenizer_file"] = "tokenizer.bin"
        write_json(os.path.join(args.out, "dataset.json"), report)
    except OSError as e:
        fail("%s: %s" % (e.filename or args.out, e.strerror or one_line(e)))
    except KeyboardInterrupt:
        fail("stopped; complete shards stay in %s, give --overwrite to begin again" % args.out)
    print("%s: %d documents, %d tokens to train on in %d file(s), %d to validate on" % (args.out, report["documents"], report["train"]["tokens"], len(report["train"]["shards"]), report["val"]["tokens"]))
    print("train with: ./train_gpt -c FILE data.train='%s/%s_train_*.bin'%s model.vocab_size=%d%s" % (args.out, args.name,
          " data.val='%s/%s_val_*.bin'" % (args.out, args.name) if report["val"]["tokens"] else "", tokenizer.vocab_size,
          " data.tokenizer=%s/tokenizer.bin" % args.out if strings is not None else ""))


if __name__ == "__main__":
    main()
