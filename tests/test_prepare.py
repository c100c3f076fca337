#!/usr/bin/env python3
"""Tests of data/prepare.py and data/make_corpus.py: python3 tests/test_prepare.py [-v]. The standard library is enough; what
needs an optional package is skipped without it. Downloads are tested against a server of our own on the loopback address."""
import contextlib
import functools
import hashlib
import http.server
import importlib.util
import io
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "data"))
import make_corpus  # noqa: E402
import prepare  # noqa: E402


def have(module):
    return importlib.util.find_spec(module) is not None


def read_file(*names):
    with open(os.path.join(*names), "rb") as f:
        return f.read()


def read_json(*names):
    return json.loads(read_file(*names))


def read_shard(path):
    """Tokens of a shard, by the format's description and not by prepare's code."""
    data = read_file(path)
    header = struct.unpack("<256i", data[:1024])
    kind = {20240520: ("H", 2, 1), 20240801: ("I", 4, 7)}[header[0]]
    assert header[1] == kind[2], header[:4]
    assert len(data) == 1024 + header[2] * kind[1], (len(data), header[:4])
    return list(struct.unpack("<%d%s" % (header[2], kind[0]), data[1024:])), header


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="test_prepare_")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def put(self, name, data):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode())
        return self.path(name)

    def prepare(self, *argv):
        """Runs main; its standard output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), mock.patch.object(prepare.Progress.__init__, "__defaults__", (io.StringIO(),)):
            prepare.main(list(argv))
        return out.getvalue()

    def refused(self, *argv):
        """Runs main, which must end with one error line; the line."""
        with self.assertRaises(SystemExit) as caught:
            self.prepare(*argv)
        self.assertIsInstance(caught.exception.code, str)
        self.assertTrue(caught.exception.code.startswith("error: "), caught.exception.code)
        self.assertNotIn("\n", caught.exception.code)
        return caught.exception.code

    def tokens(self, out, name, split):
        tokens, n = [], 0
        while os.path.exists(os.path.join(out, "%s_%s_%06d.bin" % (name, split, n))):
            tokens += read_shard(os.path.join(out, "%s_%s_%06d.bin" % (name, split, n)))[0]
            n += 1
        return tokens, n


class PrepareBytes(Folder):
    def test_text_is_bytes(self):
        """Every byte arrives, in order: NUL, CRLF, invalid UTF-8, no end of line; validation is the beginning."""
        text = bytes(range(256)) * 40 + b"\r\n\0\xff\xfeend"
        self.put("book.txt", text)
        self.prepare(self.path("book.txt"), "--out", self.path("out"), "--val-fraction", "0.1", "--shard-tokens", "3000")
        val, n_val = self.tokens(self.path("out"), "book", "val")
        train, n_train = self.tokens(self.path("out"), "book", "train")
        self.assertEqual(bytes(val + train), text)
        self.assertEqual(len(val), len(text) // 10)
        self.assertEqual((n_val, n_train), (1, 4))
        report = read_json(self.path("out", "dataset.json"))
        self.assertEqual((report["vocabulary"], report["train"]["tokens"], report["documents"]), (256, len(train), 1))
        self.assertEqual([s["tokens"] for s in report["train"]["shards"]], [3000, 3000, 3000, len(train) - 9000])
        self.assertEqual(read_shard(self.path("out", "book_train_000000.bin"))[1][3], 256)
        self.assertEqual([f for f in os.listdir(self.path("out")) if not f.endswith((".bin", ".json"))], [])

    def test_pieces_of_a_large_text(self):
        text = "".join("line %d of a text\n" % i for i in range(2000)) + "x" * 500
        self.put("book.txt", text)
        with mock.patch.object(prepare, "TEXT_PIECE", 100):
            self.prepare(self.path("book.txt"), "--out", self.path("out"), "--val-fraction", "0")
        self.assertEqual(bytes(self.tokens(self.path("out"), "book", "train")[0]), text.encode())
        self.assertEqual(self.tokens(self.path("out"), "book", "val"), ([], 0))

    def test_folders_and_documents(self):
        """Files in the order of names, an empty line between documents, other kinds of file left alone."""
        self.put("in/b.txt", "second")
        self.put("in/a/z.jsonl", '{"text": "one"}\n\n{"text": "tw\\u00f6", "id": 3}\n{"text": ""}\n')
        self.put("in/notes.md", "not this")
        self.prepare(self.path("in"), "--out", self.path("out"), "--val-fraction", "0", "--name", "n")
        self.assertEqual(bytes(self.tokens(self.path("out"), "n", "train")[0]).decode(), "second\n\none\n\ntwö")
        self.assertEqual(read_json(self.path("out", "dataset.json"))["documents"], 3)

    def test_max_tokens_and_field(self):
        self.put("a.jsonl", "".join('{"body": "%s"}\n' % ("w" * 98) for _ in range(100)))
        self.prepare(self.path("a.jsonl"), "--out", self.path("out"), "--text-field", "body", "--max-tokens", "1000", "--val-fraction", "0.2")
        total = sum(len(self.tokens(self.path("out"), "a", s)[0]) for s in ("train", "val"))
        self.assertTrue(1000 <= total <= 10000, total)

    def test_overwrite_only_when_asked(self):
        book = self.put("book.txt", "first version")
        self.prepare(book, "--out", self.path("out"), "--val-fraction", "0", "--shard-tokens", "5")
        self.put("book.txt", "second")
        self.assertIn("--overwrite", self.refused(book, "--out", self.path("out")))
        self.assertEqual(bytes(self.tokens(self.path("out"), "book", "train")[0]), b"first version")
        self.prepare(book, "--out", self.path("out"), "--val-fraction", "0", "--overwrite")
        self.assertEqual(self.tokens(self.path("out"), "book", "train"), (list(b"second"), 1))

    def test_command_line(self):
        """As a user starts it: exit codes, one line on each stream."""
        book = self.put("book.txt", "text " * 100)
        run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=60, cwd=self.folder)
        good = run([sys.executable, os.path.join(ROOT, "data", "prepare.py"), book])
        self.assertEqual(good.returncode, 0, good.stderr)
        self.assertIn("data.train='data/book/book_train_*.bin'", good.stdout)
        bad = run([sys.executable, os.path.join(ROOT, "data", "prepare.py"), "none.txt"])
        self.assertEqual((bad.returncode, bad.stderr), (1, "error: none.txt: No such file or directory\n"))


class PrepareErrors(Folder):
    def test_inputs(self):
        os.mkfifo(self.path("fifo.txt"))
        os.mkdir(self.path("empty"))
        os.mkdir(self.path("folder"))
        self.put("folder/x.txt", "")
        self.put("a.md", "text")
        self.put("bad.jsonl", '{"text": "good"}\n{"text": \n')
        self.put("deep.jsonl", "[" * 100000)
        self.put("number.jsonl", '{"text": 5}\n')
        self.put("list.jsonl", '["text"]\n')
        out = ("--out", self.path("out"))
        for name, part in (("none.txt", "No such file"), ("fifo.txt", "not a regular file"), ("empty", "no .txt, .jsonl or .parquet"), ("folder", "no text in the input"),
                           ("a.md", "must be a .txt"), ("bad.jsonl", "bad.jsonl:2: not JSON"), ("deep.jsonl", "deep.jsonl:1: not JSON"),
                           ("number.jsonl", "number.jsonl:1: no text under 'text'"), ("list.jsonl", "list.jsonl:1: no text")):
            with self.subTest(name):
                self.assertIn(part, self.refused(self.path(name), *out))
                shutil.rmtree(self.path("out"), ignore_errors=True)

    def test_options(self):
        book = self.put("book.txt", "text")
        for argv, part in ((("--val-fraction", "0.9"), "0 to 0.5"), (("--shard-tokens", "0"), "--shard-tokens 0"), (("--tokenizer", "gpt9"), "--tokenizer gpt9"),
                           (("--tokenizer", self.path("no.json")), "tokenizers" if not have("tokenizers") else "no.json"), (("--name", "../x"), "plain name"), (("tinystories",), "prepared alone")):
            with self.subTest(argv):
                self.assertIn(part, self.refused(book, *argv, "--out", self.path("out")))

    def test_missing_packages(self):
        book = self.put("book.txt", "text")
        parquet = self.put("a.parquet", "text")
        for module, argv in (("tiktoken", (book, "--tokenizer", "gpt2")), ("tokenizers", (book, "--tokenizer", "t.json")), ("pyarrow", (parquet,)), ("pyarrow", ("fineweb", "--tokenizer", "bytes"))):
            with self.subTest(module), mock.patch.dict(sys.modules, {module: None}):
                self.assertIn("pip install " + module, self.refused(*argv, "--out", self.path("out")))

    def test_output(self):
        book = self.put("book.txt", "text")
        self.assertIn("book.txt", self.refused(book, "--out", self.path("book.txt")))
        self.assertIn("\\x1b", self.refused(self.path("red\x1b[31m.txt")))

    @unittest.skipUnless(have("pyarrow"), "needs pyarrow")
    def test_parquet(self):
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]}), self.path("a.parquet"))
        self.prepare(self.path("a.parquet"), "--out", self.path("out"), "--val-fraction", "0")
        self.assertEqual(bytes(self.tokens(self.path("out"), "a", "train")[0]), b"one\n\ntwo")
        self.assertIn("no column 'body'", self.refused(self.path("a.parquet"), "--out", self.path("o2"), "--text-field", "body"))
        self.put("b.parquet", "PAR1 not really")
        self.assertIn("not a readable parquet", self.refused(self.path("b.parquet"), "--out", self.path("o3")))


class TokenizerFiles(Folder):
    def test_round_trip(self):
        strings = [bytes([i]) for i in range(256)] + [b"", b"abc", b"\xff" * 255, b"<|endoftext|>"]
        prepare.write_tokenizer(self.path("t.bin"), strings, 259)
        self.assertEqual(prepare.read_tokenizer(self.path("t.bin")), (strings, 259))
        data = read_file(self.path("t.bin"))
        self.assertEqual(struct.unpack("<4i", data[:16]), (20240328, 2, 260, 259))
        self.assertEqual(data[1024:1030], b"\x01\x00\x01\x01\x01\x02")
        for cut in (0, 1023, 1024, len(data) - 1):
            self.put("cut.bin", data[:cut])
            with self.assertRaises(ValueError):
                prepare.read_tokenizer(self.path("cut.bin"))
        with self.assertRaises(SystemExit):
            prepare.write_tokenizer(self.path("t.bin"), [b"x" * 256], -1)

    def test_byte_alphabet(self):
        table = prepare.byte_alphabet()
        self.assertEqual(sorted(table.values()), list(range(256)))
        self.assertEqual((table["\u0120"], table["\u010a"], table["A"], table["\u00ff"], table["\u0143"]), (32, 10, 65, 255, 173))

    def test_gpt2(self):
        """With a stand-in for tiktoken, whose vocabulary is a download: one byte a token, as 256 + byte."""
        class Encoding:
            def encode_ordinary(self, text):
                return [256 + b for b in text.encode()]

            def decode_single_token_bytes(self, i):
                return b"<|endoftext|>" if i == 50256 else bytes([i % 256])

        good = mock.Mock(get_encoding=lambda name: {"gpt2": Encoding()}[name])
        self.put("a.jsonl", json.dumps({"text": "h\u00e9"}) + "\n" + json.dumps({"text": "\ud800x"}) + "\n")
        with mock.patch.dict(sys.modules, tiktoken=good):
            self.prepare(self.path("a.jsonl"), "--out", self.path("out"), "--tokenizer", "gpt2", "--val-fraction", "0", "--processes", "1")
        self.assertEqual(self.tokens(self.path("out"), "a", "train")[0], [50256] + [256 + b for b in "h\u00e9".encode()] + [50256] + [256 + b for b in "\ufffdx".encode()])
        strings, end = prepare.read_tokenizer(self.path("out", "tokenizer.bin"))
        self.assertEqual((len(strings), end, strings[50256]), (50257, 50256, b"<|endoftext|>"))
        bad = mock.Mock(get_encoding=mock.Mock(side_effect=ConnectionError("no\nnetwork")))
        with mock.patch.dict(sys.modules, tiktoken=bad):
            self.assertIn("TIKTOKEN_CACHE_DIR", self.refused(self.path("a.jsonl"), "--out", self.path("two"), "--tokenizer", "gpt2"))

    @unittest.skipUnless(have("tokenizers"), "needs tokenizers")
    def test_hugging_face(self):
        """A byte-level BPE made here: tokens decode to the text, and so do their strings one by one; processes change nothing."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        text = "the cat sat on the mat, and the caf\u00e9 cat\tsat \U0001f600 too\n" * 60
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        tokenizer.save(self.path("tokenizer.json"))
        self.put("a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in (text, "the end", "<|endoftext|>", "")))
        self.prepare(self.path("a.jsonl"), "--out", self.path("out"), "--tokenizer", self.path("tokenizer.json"), "--val-fraction", "0", "--processes", "1")
        tokens, _ = self.tokens(self.path("out"), "a", "train")
        strings, end = prepare.read_tokenizer(self.path("out", "tokenizer.bin"))
        self.assertEqual((len(strings), strings[end]), (tokenizer.get_vocab_size(), b"<|endoftext|>"))
        self.assertEqual(b"".join(strings[i] for i in tokens).decode(), "<|endoftext|>" + text + "<|endoftext|>the end<|endoftext|><|endoftext|>")
        self.assertEqual(tokens[0], end)
        self.assertLess(len(tokens), len(text) // 2)
        with mock.patch.object(prepare, "batches", functools.partial(lambda f, items, _: f(items, 10), prepare.batches)):
            self.prepare(self.path("a.jsonl"), "--out", self.path("two"), "--tokenizer", self.path("tokenizer.json"), "--val-fraction", "0", "--processes", "2")
        self.assertEqual(self.tokens(self.path("two"), "a", "train")[0], tokens)
        self.put("broken.json", "{}")
        self.assertIn("broken.json: not a tokenizer.json", self.refused(self.path("a.jsonl"), "--out", self.path("three"), "--tokenizer", self.path("broken.json")))

    @unittest.skipUnless(have("tokenizers"), "needs tokenizers")
    def test_hugging_face_wide(self):
        """More than 65536 tokens give 32-bit shards; SentencePiece's blanks and byte tokens become bytes."""
        vocab = {"<unk>": 0, "<0x0A>": 1, "\u2581the": 2, "\u2581": 3, "x": 4}
        vocab.update({"w%d" % i: i for i in range(5, 70000)})
        definition = {"version": "1.0", "added_tokens": [{"id": 0, "content": "<unk>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
                      "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}}
        self.put("tokenizer.json", json.dumps(definition))
        self.put("a.txt", "w69999 w5 \u2581the none w6")
        self.prepare(self.path("a.txt"), "--out", self.path("out"), "--tokenizer", self.path("tokenizer.json"), "--val-fraction", "0", "--processes", "1")
        tokens, header = read_shard(self.path("out", "a_train_000000.bin"))
        self.assertEqual((header[0], header[1], header[3]), (20240801, 7, 70000))
        self.assertEqual(tokens, [69999, 5, 2, 0, 6])
        strings, end = prepare.read_tokenizer(self.path("out", "tokenizer.bin"))
        self.assertEqual((strings[:5], end), ([b"<unk>", b"\n", b" the", b" ", b"x"], -1))


class Server(http.server.BaseHTTPRequestHandler):
    """Serves server.files; understands Range; cuts the first answers of server.cuts short."""

    def do_GET(self):
        body = self.server.files.get(self.path)
        self.server.ranges.append(self.headers.get("Range"))
        if body is None:
            self.send_error(404)
            return
        start = int(self.headers["Range"][6:-1]) if self.headers.get("Range") else 0
        if start > len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[start:start + cut])

    def log_message(self, *_):
        pass


class Downloads(Folder):
    def setUp(self):
        super().setUp()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        self.server.files, self.server.ranges, self.server.cuts = {}, [], []
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]
        patch = mock.patch.object(prepare.time, "sleep", lambda _: None)
        patch.start()
        self.addCleanup(patch.stop)

    def test_shakespeare_with_a_broken_connection(self):
        text = random.Random(1).randbytes(30000)
        self.server.files["/input.txt"] = text
        self.server.cuts = [1000, 5000]
        with mock.patch.dict(prepare.SOURCES, tinyshakespeare=("bytes", len(text), [(None, self.url + "/input.txt")])):
            self.prepare("tinyshakespeare", "--out", self.path("out"))
        self.assertEqual(bytes(self.tokens(self.path("out"), "tinyshakespeare", "val")[0] + self.tokens(self.path("out"), "tinyshakespeare", "train")[0]), text)
        self.assertEqual(self.server.ranges, [None, "bytes=1000-", "bytes=6000-"])
        with mock.patch.dict(prepare.SOURCES, tinyshakespeare=("bytes", len(text), [(None, self.url + "/input.txt")])):
            self.prepare("tinyshakespeare", "--out", self.path("out"), "--overwrite")  # from the file that is there
        self.assertEqual(len(self.server.ranges), 3)

    def test_tinystories(self):
        self.server.files["/v.txt"] = b"A val story.\n<|endoftext|>\n"
        self.server.files["/t.txt"] = b"One.\nTwo lines.\n<|endoftext|>\n\n<|endoftext|>\nThe last\n"
        with mock.patch.dict(prepare.SOURCES, tinystories=("bytes", 100, [("val", self.url + "/v.txt"), ("train", self.url + "/t.txt")])):
            self.prepare("tinystories", "--out", self.path("out"))
        self.assertEqual(bytes(self.tokens(self.path("out"), "tinystories", "val")[0]), b"A val story.")
        self.assertEqual(bytes(self.tokens(self.path("out"), "tinystories", "train")[0]), b"\n\nOne.\nTwo lines.\n\n\n\nThe last")

    def test_failures(self):
        progress = prepare.Progress(io.StringIO())
        for url, part in ((self.url + "/none", "404"), ("http://127.0.0.1:1/x", "refused")):
            with self.subTest(url), self.assertRaises(SystemExit) as caught:
                prepare.download(url, self.path("x"), progress)
            self.assertIn(part, caught.exception.code)
            self.assertNotIn("\n", caught.exception.code)
        self.server.files["/x"] = b"short"
        self.put("x.part", b"longer than the file")  # what is left of another file
        self.assertEqual(read_file(prepare.download(self.url + "/x", self.path("x"), progress)), b"short")

    def test_hub_folder(self):
        self.server.files["/api/datasets/a/b/tree/main/sample/10BT"] = json.dumps([{"type": "file", "path": "sample/10BT/001.parquet"}, {"type": "directory", "path": "x.parquet"},
                                                                                    {"type": "file", "path": "sample/10BT/000.parquet"}, {"type": "file", "path": "README.md"}]).encode()
        self.server.files["/api/datasets/a/b/tree/main/none"] = b"[]"
        self.server.files["/api/datasets/a/b/tree/main/odd"] = b'{"error": "gone"}'
        with mock.patch.object(prepare, "HUGGING_FACE", self.url):
            self.assertEqual(prepare.list_hub_folder("a/b", "sample/10BT", None), [self.url + "/datasets/a/b/resolve/main/sample/10BT/00%d.parquet" % i for i in (0, 1)])
            for folder in ("none", "odd", "missing"):
                with self.subTest(folder), self.assertRaises(SystemExit):
                    prepare.list_hub_folder("a/b", folder, None)


# ---------------------------------------------------------------------------------------------------------------

def derivations(grammar, text):
    """Number of derivations of a story, and the sum of their probabilities, by a parser that shares nothing with the generator
    but the automaton: states are (place in the text, leaf, values chosen)."""
    states, complete = {(0, None, ()): (1, 1.0)}, [0, 0.0]
    while states:
        behind = {}
        for (at, leaf, chosen), (n, p) in states.items():
            follow = grammar.start if leaf is None else grammar.follow[leaf]
            if not follow and at == len(text):
                complete[0] += n
                complete[1] += p
            for then, q in follow.items():
                kind = grammar.leaves[then]
                if kind[0] == "text":
                    options = [(kind[1], chosen, q)]
                else:
                    known = dict(chosen)
                    values = [known[kind[1]]] if kind[1] in known else range(len(make_corpus.VARIABLES[kind[1]]))
                    options = [(make_corpus.form_text(kind[1], v, kind[2]), tuple(sorted({**known, kind[1]: v}.items())), q / len(values)) for v in values]
                for piece, then_chosen, q2 in options:
                    if text.startswith(piece, at):
                        key = (at + len(piece), then, then_chosen)
                        old = behind.get(key, (0, 0.0))
                        behind[key] = (old[0] + n, old[1] + p * q2)
        states = behind
    return complete


class Corpus(Folder):
    def test_one_derivation_each(self):
        """The grammar is unambiguous on what it draws, and the generator's probability is the parser's."""
        grammar, rng = make_corpus.Grammar(), random.Random(5)
        for _ in range(300):
            story, cost = grammar.draw(rng)
            count, p = derivations(grammar, story)
            self.assertEqual(count, 1, story)
            self.assertAlmostEqual(-math.log(p), cost, places=9)
            self.assertTrue(story.endswith("\n\n") and "\n" not in story[:-2], story)
            self.assertNotIn("  ", story)
            self.assertTrue(story.isascii())

    def test_entropy_and_length_are_the_means_of_draws(self):
        grammar, rng, n = make_corpus.Grammar(), random.Random(6), 4000
        draws = [grammar.draw(rng) for _ in range(n)]
        for value, exact in (([len(s) for s, _ in draws], grammar.expected_bytes()), ([c for _, c in draws], grammar.entropy())):
            mean = sum(value) / n
            error = math.sqrt(sum((x - mean) ** 2 for x in value) / n / n)
            self.assertLess(abs(mean - exact), 4 * error)
            self.assertLess(error, 0.01 * exact)  # or the row above would prove nothing

    def test_entropy_by_hand(self):
        with mock.patch.dict(make_corpus.VARIABLES, {"hero": [{"name": "Al", "he": "he"}, {"name": "Bea", "he": "she"}, {"name": "Cy", "he": "he"}]}, clear=True):
            grammar = make_corpus.Grammar({"story": "[a|b@more] <hero.name>.\n\n", "more": "[x|yy <hero.He>]"})
            # a: 1/2, bx: 1/4, byy He: 1/4, each with one of three names
            self.assertAlmostEqual(grammar.entropy(), 1.5 * math.log(2) + math.log(3), places=12)
            name, he = 7 / 3, 7 / 3
            self.assertAlmostEqual(grammar.expected_bytes(), 4 + name + 0.5 * 1 + 0.25 * 2 + 0.25 * (4 + he), places=12)

    def test_window_model_against_frequencies(self):
        """A grammar so small that every window can be counted in a long stream: the model's probabilities are the frequencies."""
        with mock.patch.dict(make_corpus.VARIABLES, {"hero": [{"name": "ab", "he": "a"}, {"name": "b", "he": "e"}, {"name": "abb", "he": "a"}]}, clear=True):
            grammar = make_corpus.Grammar({"story": "<hero.name>[b|ab|b<hero.he>]<hero.he>c<hero.name>\n"})
            rng = random.Random(3)
            stream = "".join(grammar.draw(rng)[0] for _ in range(60000))
            model = make_corpus.WindowModel(grammar)
            for width in (2, 4, 9):
                counts, firsts = {}, {}
                for i in range(len(stream) - width):
                    window = stream[i:i + width]
                    counts[window] = counts.get(window, 0) + 1
                    firsts[window[0]] = firsts.get(window[0], 0) + 1
                sums = {}
                for window, count in counts.items():
                    p = math.exp(-model.cost(window))
                    sums[window[0]] = sums.get(window[0], 0.0) + p
                    n = firsts[window[0]]
                    # counts of overlapping windows vary like binomial ones, up to a factor that 6 sigma cover
                    self.assertLess(abs(count - n * p), 6 * math.sqrt(n * p) + 3, (window, count, n * p))
                for first, total in sums.items():
                    self.assertAlmostEqual(total, 1, delta=0.003, msg=first)  # what was never seen is rare

    def test_window_floor_lies_above_the_floor_and_falls(self):
        grammar = make_corpus.Grammar()
        text, _ = make_corpus.make_text(grammar, random.Random(9), 100000)
        floor = grammar.entropy() / grammar.expected_bytes()
        means = [make_corpus.window_floor(grammar, text, context, 100)[0] for context in (32, 128, 1024)]
        self.assertTrue(means[0] > means[1] > means[2] > 0.97 * floor, (means, floor))

    def test_files(self):
        """As the quickstart calls it: within its time, the same bytes for the same seed, others for another, text equal to shards."""
        script = os.path.join(ROOT, "data", "make_corpus.py")

        def run(out, *argv):
            done = subprocess.run([sys.executable, script, "--out", self.path(out), *argv], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            return read_json(self.path(out, "corpus.json"))

        def digest(*names):
            return hashlib.sha256(read_file(self.path(*names))).hexdigest()

        small = ("--train-bytes", "20000", "--val-bytes", "5000", "--windows", "20")
        report = run("a", *small)
        self.assertGreaterEqual(report["train"]["bytes"], 20000)
        self.assertAlmostEqual(report["floor"]["bits_per_byte"], report["floor"]["nats_per_byte"] / math.log(2), places=5)
        self.assertLess(abs(report["train"]["nats_per_byte"] / report["floor"]["nats_per_byte"] - 1), 0.05)
        run("b", *small)
        run("c", *small, "--seed", "2")
        run("d", *small, "--bin")
        self.assertEqual(digest("a", "train.txt"), digest("b", "train.txt"))
        self.assertNotEqual(digest("a", "train.txt"), digest("c", "train.txt"))
        self.assertNotEqual(digest("a", "train.txt"), digest("a", "val.txt"))
        self.assertEqual(bytes(read_shard(self.path("d", "val.bin"))[0]), read_file(self.path("a", "val.txt")))
        bad = subprocess.run([sys.executable, script, "--out", self.path("a", "train.txt")], capture_output=True, text=True, timeout=60)
        self.assertEqual((bad.returncode, bad.stderr.count("\n"), bad.stderr[:7]), (1, 1, "error: "))


if __name__ == "__main__":
    unittest.main()
