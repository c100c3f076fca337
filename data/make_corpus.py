#!/usr/bin/env python3
"""make_corpus.py - a small corpus of stories whose entropy is known, made offline.

A story is drawn from a probabilistic grammar: a tree of alternatives, all of one place equally likely, plus a few
variables (hero, friend, thing) that are drawn when they are first named and then stay for the story, in forms that
agree (Anna - she - her; an apple - eat). The grammar is unambiguous: a text has one derivation (data/README.md says how
this is tested). So the entropy of the text is the entropy of the choices, and the loss that a perfect model reaches on
it can be computed. Three figures go into corpus.json, each in nats per byte and in bits per byte:

  floor            of the grammar: entropy of a story / expected bytes of a story, exactly. No model that sees the whole
                   past can do better on average.
  train, val       of the files that were drawn: -ln(probability of the file under the grammar) / bytes. The floor with
                   the luck of this draw.
  window           what a perfect model reaches that sees windows of `context` bytes with no past, as training on samples does:
                   at the start of a window it can not know the hero's name or the middle of which sentence this is. Exact for
                   each window (a sum over all places of the grammar where the window can begin), averaged over windows
                   of the val file; the standard error is given. The loss of training is to be compared with this one.

Usage: make_corpus.py [--out data/corpus] [--train-bytes N] [--val-bytes N] [--seed N] [--context T] [--bin]
Python's standard library only. The same seed gives the same files.
"""
import argparse
import json
import math
import os
import random
import struct
import sys

# ---------------------------------------------------------------------------------------------------------------
# The grammar. [a|b|c] is one of the alternatives, each equally likely; they may nest. @name is a copy of a rule. <var.form> is
# a form of a variable, <var.Form> the same with a capital letter. A story is one line; an empty line ends it.

RULES = {
    "story": "@opening @middle @ending\n\n",
    "opening": "[@once|@one_day|@there_was]",
    "once": "Once <hero.name> and a @look <friend.kind> named <friend.name> lived @where.",
    "one_day": "One @weather @daytime, <hero.name> @went @where with a @look <friend.kind> named <friend.name>.",
    "there_was": "<hero.Name> was a @mood child with a @look <friend.kind> named <friend.name>.",
    "middle": "[@lost|@found|@gift|@quarrel]",
    "lost": "<hero.He> had <thing.a>, @look and @look. One @daytime the <thing.name> was gone! <hero.He> looked @where and @where and felt @sad. "
            "Then <friend.name> @went @where and found it.",
    "found": "@where_first they met a @mood @person with a @look <thing.name>. \"You may <thing.use> it,\" said the @person_again, \"if you @task.\" So they @went @where and did it.",
    "gift": "<hero.He> @went @where and found <thing.a> for <friend.name>. It was @look and @look. "
            "\"Now you can <thing.use> it @where!\" <hero.he> said. <friend.Name> felt @glad and @went @where.",
    "quarrel": "They saw <thing.a> @where. Both wanted to <thing.use> it. <hero.Name> felt @sad and <friend.name> felt @sad. "
               "Then a @mood @person gave them @taste @food and @taste @food.",
    "ending": "[@thanks|@home_again|@lesson]",
    "thanks": "\"Thank you, <friend.name>,\" said <hero.name>. <hero.He> felt @glad and liked to <thing.use> the <thing.name> @where.",
    "home_again": "At night <hero.name> and <friend.name> ate @taste @food and @taste @food. <hero.He> put the <thing.name> @where.",
    "lesson": "Now <hero.name> and <friend.name> <thing.use> the <thing.name> @where every @weather @daytime.",
    "person_again": "[old one|stranger]",
    "task": "[find my @look hat|carry my @look bag|bring me @taste @food]",
    "where": "@at the @spot",
    "where_first": "[Under|Behind|Near|Above|Below|Beside] the @spot",
    "at": "[under|behind|near|above|below|beside]",
    "spot": "[tree|river|rock|wall|well|bush|fence|barn|bridge|hill|pond|gate|mill|cave|road|tower]",
    "went": "[ran|walked|hopped|danced|skipped|marched|crept|rolled]",
    "weather": "[sunny|windy|rainy|cloudy|warm|cold|foggy|snowy]",
    "daytime": "[morning|evening|day|night]",
    "look": "[red|blue|green|yellow|white|black|brown|gray|shiny|soft|little|fluffy|old|golden|dusty|big]",
    "mood": "[happy|shy|brave|kind|clever|quiet|funny|gentle]",
    "person": "[farmer|baker|sailor|teacher|king|queen|wizard|painter]",
    "sad": "[sad|angry|lonely|upset]",
    "glad": "[glad|proud|merry|lucky]",
    "taste": "[sweet|warm|fresh|sour|cold|salty|dry|thick]",
    "food": "[soup|bread|cake|rice|beans|jam|cheese|honey]",
}

GIRLS = "Anna Bella Daisy Emma Lily Mia Nora Rosa".split()
BOYS = "Adam Ben Carl Finn Jack Leo Max Tom".split()
FRIENDS = "dog Rex,cat Luna,duck Waddle,frog Pip,bear Bruno,fox Rusty,goat Billy,owl Hoot".split(",")
THINGS = "ball:throw,kite:fly,book:read,drum:beat,boat:sail,apple:eat,bike:ride,flute:play,umbrella:hold,bell:ring,egg:boil,ax:swing".split(",")

VARIABLES = {
    "hero": [{"name": n, "he": "she", "him": "her", "his": "her"} for n in GIRLS] + [{"name": n, "he": "he", "him": "him", "his": "his"} for n in BOYS],
    "friend": [{"kind": f.split()[0], "name": f.split()[1]} for f in FRIENDS],
    "thing": [{"name": t.split(":")[0], "use": t.split(":")[1], "a": ("an " if t[0] in "aeiou" else "a ") + t.split(":")[0]} for t in THINGS],
}


def form_text(variable, value, form):
    text = VARIABLES[variable][value][form.lower()]
    return text[0].upper() + text[1:] if form[0].isupper() else text


# ---------------------------------------------------------------------------------------------------------------
# The grammar as an automaton. A leaf is a piece of text or a form of a variable; behind each leaf, a distribution over the
# leaves that may follow. Every use of a rule makes its own copy, so that a path of leaves is a derivation.

class Grammar:
    def __init__(self, rules=RULES, start="story"):
        self.rules = rules
        self.leaves = []   # ("text", text) or ("var", variable, form)
        self.follow = []   # per leaf {leaf: probability}; empty behind the last leaf of a story
        self.start = self.build(self.parse(rules[start]), {})

    def parse(self, text):
        """A rule's text as a list of str, ("alt", [list, ...]) and ("var", variable, form)."""
        def sequence(at, closing):
            items, plain = [], ""
            while at < len(text) and not (closing and text[at] in "|]"):
                c, item = text[at], None
                if c == "[":
                    branches, at = [], at + 1
                    while True:
                        branch, at = sequence(at, True)
                        branches.append(branch)
                        at += 1
                        if text[at - 1] == "]":
                            break
                    item = ("alt", branches)
                elif c == "<":
                    end = text.index(">", at)
                    item, at = ("var",) + tuple(text[at + 1:end].split(".")), end + 1
                elif c == "@":
                    end = at + 1
                    while end < len(text) and (text[end].isalpha() or text[end] == "_"):
                        end += 1
                    item, at = ("alt", [self.parse(self.rules[text[at + 1:end]])]), end
                else:
                    plain, at = plain + c, at + 1
                if item:
                    items += ([plain] if plain else []) + [item]
                    plain = ""
            return items + ([plain] if plain else []), at
        return sequence(0, False)[0]

    def build(self, items, follow):
        """Adds the leaves of a sequence, last one first, and returns the distribution over its first leaf."""
        for item in reversed(items):
            if isinstance(item, tuple) and item[0] == "alt":
                first = {}
                for branch in item[1]:
                    for leaf, p in self.build(branch, follow).items():
                        first[leaf] = first.get(leaf, 0) + p / len(item[1])
                follow = first
            else:
                self.leaves.append(("text", item) if isinstance(item, str) else item)
                self.follow.append(follow)
                follow = {len(self.leaves) - 1: 1.0}
        return follow

    def texts(self, leaf):
        """{text: set of the values that give it, as a bit mask} of a leaf; mask 0 for plain text."""
        if leaf[0] == "text":
            return {leaf[1]: 0}
        groups = {}
        for value in range(len(VARIABLES[leaf[1]])):
            text = form_text(leaf[1], value, leaf[2])
            groups[text] = groups.get(text, 0) | 1 << value
        return groups

    def reach(self):
        """Probability that a story passes each leaf. A leaf's number is larger than those of the leaves behind it."""
        reach = [0.0] * len(self.leaves)
        for leaf, p in self.start.items():
            reach[leaf] += p
        for leaf in range(len(self.leaves) - 1, -1, -1):
            for then, p in self.follow[leaf].items():
                reach[then] += reach[leaf] * p
        return reach

    def expected_bytes(self):
        total = 0.0
        for leaf, p in zip(self.leaves, self.reach()):
            n = 1 if leaf[0] == "text" else len(VARIABLES[leaf[1]])
            total += p * sum(len(text) * (bin(mask).count("1") or 1) for text, mask in self.texts(leaf).items()) / n
        return total

    def entropy(self):
        """Entropy of a story in nats: of its choices, and of each variable that it names."""
        def entropy_of(distribution):
            return -sum(p * math.log(p) for p in distribution.values())
        total = entropy_of(self.start) + sum(p * entropy_of(follow) for p, follow in zip(self.reach(), self.follow) if follow)
        for variable, values in VARIABLES.items():
            named = [0.0] * len(self.leaves)  # probability that the variable is named from this leaf on
            for i, leaf in enumerate(self.leaves):
                named[i] = 1.0 if leaf[0] == "var" and leaf[1] == variable else sum(p * named[then] for then, p in self.follow[i].items())
            total += sum(p * named[leaf] for leaf, p in self.start.items()) * math.log(len(values))
        return total

    def draw(self, rng):
        """One story: its text and -ln of its probability."""
        parts, cost, chosen, follow = [], 0.0, {}, self.start
        while follow:
            if len(follow) == 1:
                leaf = next(iter(follow))
            else:
                leaf, x = None, rng.random()
                for leaf, p in follow.items():
                    x -= p
                    if x < 0:
                        break
                cost -= math.log(follow[leaf])
            kind = self.leaves[leaf]
            if kind[0] == "text":
                parts.append(kind[1])
            else:
                if kind[1] not in chosen:
                    chosen[kind[1]] = int(rng.random() * len(VARIABLES[kind[1]]))
                    cost += math.log(len(VARIABLES[kind[1]]))
                parts.append(form_text(kind[1], chosen[kind[1]], kind[2]))
            follow = self.follow[leaf]
        return "".join(parts), cost


# ---------------------------------------------------------------------------------------------------------------
# The loss of a perfect model on a window without a past

class WindowModel:
    """The probability of a window of the endless stream of stories, seen from a place that is not known.

    A hypothesis says which leaf comes next and which values each variable may still have. A window begins somewhere in some
    leaf; each place has the weight with which the stream visits it. What is summed is exact: hypotheses are
    merged when they agree, and never dropped."""

    def __init__(self, grammar):
        self.grammar = grammar
        self.texts = [grammar.texts(leaf) for leaf in grammar.leaves]
        self.begin = {}  # first byte -> [(leaf, rest of its text, mask, weight)]
        mean = grammar.expected_bytes()
        for leaf, p in enumerate(grammar.reach()):
            n = 1 if grammar.leaves[leaf][0] == "text" else len(VARIABLES[grammar.leaves[leaf][1]])
            for text, mask in self.texts[leaf].items():
                for at in range(len(text)):
                    self.begin.setdefault(text[at], []).append((leaf, text[at:], mask, p * (bin(mask).count("1") or 1) / n / mean))

    def cost(self, window):
        """-ln P(window[1:] | window[0])."""
        n, total, none = len(window), 0.0, (0,) * len(VARIABLES)
        order = list(VARIABLES)
        at_place = [{} for _ in range(n)]  # bytes explained -> {(leaf before, masks): weight}
        first = self.begin[window[0]]
        for leaf, rest, mask, weight in first:
            if window.startswith(rest) if len(rest) < n else rest.startswith(window):
                kind = self.grammar.leaves[leaf]
                masks = none if kind[0] == "text" else tuple(mask if v == kind[1] else 0 for v in order)
                if len(rest) >= n:
                    total += weight
                else:
                    key = (leaf, masks)
                    at_place[len(rest)][key] = at_place[len(rest)].get(key, 0.0) + weight
        for at in range(1, n):
            for (leaf, masks), weight in at_place[at].items():
                follow = self.grammar.follow[leaf]
                if not follow:  # a new story: nothing is chosen yet
                    follow, masks = self.grammar.start, none
                for then, p in follow.items():
                    kind = self.grammar.leaves[then]
                    for text, mask in self.texts[then].items():
                        if not (window.startswith(text, at) if at + len(text) <= n else text.startswith(window[at:])):
                            continue
                        w, new = weight * p, masks
                        if kind[0] == "var":
                            i = order.index(kind[1])
                            known = masks[i] or (1 << len(VARIABLES[kind[1]])) - 1
                            if not known & mask:
                                continue
                            w *= bin(known & mask).count("1") / bin(known).count("1")
                            new = masks[:i] + (known & mask,) + masks[i + 1:]
                        if at + len(text) >= n:
                            total += w
                        else:
                            key = (then, new)
                            at_place[at + len(text)][key] = at_place[at + len(text)].get(key, 0.0) + w
        return math.log(sum(b[3] for b in first)) - math.log(total)


def window_floor(grammar, text, context, n_windows):
    """Mean over windows of the text in nats per byte, and its standard error."""
    model, costs = WindowModel(grammar), []
    places = max(1, (len(text) - 1) // context)
    step = max(1, places // n_windows)
    for i in range(0, places, step):
        window = text[i * context:(i + 1) * context + 1]
        costs.append(model.cost(window) / (len(window) - 1))
    mean = sum(costs) / len(costs)
    variance = sum((c - mean) ** 2 for c in costs) / max(1, len(costs) - 1)
    return mean, math.sqrt(variance / len(costs))


# ---------------------------------------------------------------------------------------------------------------

def make_text(grammar, rng, n_bytes):
    """Whole stories, at least n_bytes of them, and -ln of their probability."""
    parts, size, cost = [], 0, 0.0
    while size < n_bytes:
        story, c = grammar.draw(rng)
        parts.append(story)
        size += len(story)
        cost += c
    return "".join(parts), cost


def write_file(path, text, as_shard):
    """Text, or a shard of 16-bit tokens; complete or not at all."""
    data = text.encode("ascii")
    if as_shard:
        header = struct.pack("<256i", 20240520, 1, len(data), 256, *[0] * 252)
        tokens = bytearray(2 * len(data))
        tokens[::2] = data
        data = header + tokens
    with open(path + ".part", "wb") as f:
        f.write(data)
    os.replace(path + ".part", path)


def both_units(nats):
    return {"nats_per_byte": round(nats, 6), "bits_per_byte": round(nats / math.log(2), 6)}


def main():
    parser = argparse.ArgumentParser(description="Makes a corpus of small stories whose entropy is known.")
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus"), help="folder to write to (default: corpus beside this script)")
    parser.add_argument("--train-bytes", type=int, default=4_000_000, help="at least so many bytes to train on (default 4000000)")
    parser.add_argument("--val-bytes", type=int, default=200_000, help="at least so many bytes to evaluate on (default 200000)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same files (default 1)")
    parser.add_argument("--context", type=int, default=128, help="window of the 'window' figure in bytes; give the model's sequence length (default 128)")
    parser.add_argument("--windows", type=int, default=300, help="windows that are averaged (default 300)")
    parser.add_argument("--bin", action="store_true", help="write token shards (.bin) instead of text (.txt)")
    args = parser.parse_args()
    for name in ("train_bytes", "val_bytes", "context", "windows"):
        if getattr(args, name) < 1:
            sys.exit("error: --%s must be at least 1, not %d" % (name.replace("_", "-"), getattr(args, name)))
    grammar = Grammar()
    nats, mean_bytes = grammar.entropy(), grammar.expected_bytes()
    report = {"seed": args.seed, "vocabulary": 256, "story_nats": round(nats, 6), "story_bytes": round(mean_bytes, 6), "floor": both_units(nats / mean_bytes)}
    try:
        os.makedirs(args.out, exist_ok=True)
        for i, (name, size) in enumerate((("train", args.train_bytes), ("val", args.val_bytes))):
            text, cost = make_text(grammar, random.Random(2 * args.seed + i), size)
            file = name + (".bin" if args.bin else ".txt")
            write_file(os.path.join(args.out, file), text, args.bin)
            report[name] = {"file": file, "bytes": len(text), "stories": text.count("\n\n"), **both_units(cost / len(text))}
        mean, error = window_floor(grammar, text, args.context, args.windows)
        report["window"] = {"context": args.context, **both_units(mean), "standard_error_nats": round(error, 6)}
        write_report(os.path.join(args.out, "corpus.json"), report)
    except OSError as e:
        sys.exit("error: %s: %s" % (e.filename or args.out, e.strerror))
    print("%s: %d stories to train on, %d to evaluate on; a perfect model reaches a loss of %.4f nats per byte (%.4f with windows of %d bytes)"
          % (args.out, report["train"]["stories"], report["val"]["stories"], report["floor"]["nats_per_byte"], mean, args.context))


def write_report(path, report):
    with open(path + ".part", "w", encoding="ascii") as f:
        json.dump(report, f, indent=1)
        f.write("\n")
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
