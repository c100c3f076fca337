"""scripts/profile.py on a trace that is written here: parts, updates, and the time in which nothing ran."""
import contextlib
import importlib.util
import io
import os
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
spec = importlib.util.spec_from_file_location("profile_kernels", os.path.join(ROOT, "scripts", "profile.py"))
profile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(profile)

# stream, start, end, name: three updates of 100 us; in each a product of 60 us and a copy beside its second half and 10 us longer.
TRACE = []
for u in range(3):
    at = u * 100_000
    TRACE += [f"7\t{at}\t{at + 60_000}\tnvjet_sm90_tst\n", f"8\t{at + 30_000}\t{at + 70_000}\tcopy 1, many bytes\n",
              f"7\t{at + 95_000}\t{at + 100_000}\t_Z21update_control_kernelP13UpdateControl\n"]


class Profile(unittest.TestCase):
    def test_parts(self):
        for name, part in (("_Z20matmul_hopper_kernelI13__nv_bfloat16Lb0EL12MatmulFinish1EE", "products"), ("_Z19plain_matmul_kernelIffE", "products"),
                           ("sm90_xmma_gemm_bf16_gelu", "products"), ("_Z31attention_backward_hopper_kernelE", "attention backward"),
                           ("_Z24attention_forward_kernelE", "attention forward"), ("_Z19bias_partial_kernelE", "gradients of biases"), ("_Z3newv", "other")):
            self.assertEqual(profile.part_of(name), part, name)

    def test_updates_and_idle_time(self):
        updates = profile.updates_of(TRACE)
        self.assertEqual([len(rows) for rows in updates], [3, 3, 3])
        self.assertEqual(profile.busy(updates[1]), 75_000)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            profile.table(updates, 10)
        for row in ("An update takes 0.100 ms (mean of 2), 3 kernels", "| products | 0.060 | 60.0 % |", "| copies | 0.040 | 40.0 % |", "| idle | 0.025 | 25.0 % |"):
            self.assertIn(row, text.getvalue())


if __name__ == "__main__":
    unittest.main()
