"""Writes the golden token ids beside this file, from llama.cpp.

    python -m venv oracle && oracle/bin/pip install llama-cpp-python==0.3.36 tokenizers gguf
    oracle/bin/python tests/data/tokenizer/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

`synthetic.json`: a vocabulary trained on the texts themselves without any cutting, so that merges
cross every border a pre-tokenizer draws, and the ids of the texts for each rule.
`smollm2.json`: the ids for the real SmolLM2 vocabulary, with the part of it that they need.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
ORIGIN = f"llama.cpp as in llama-cpp-python {llama_cpp.__version__}"
COMMAND = "python tests/data/tokenizer/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf"

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "Hello, world!",
    " leading space",
    "   three leading spaces",
    "trailing space ",
    "trailing spaces   ",
    "a  b   c    d",
    "line one\nline two\n\nline four\n\n\n  indented\n",
    "dos\r\nline\r\n\r\nend\r\n",
    "tab\tand\t\ttabs \t mixed \n \n x",
    "non\u00a0breaking\u00a0\u00a0space \u3000ideographic\u3000\u3000 \u2003em",
    "next\u0085line \u2028sep\u2029 para \x0b vt \x0c ff \x1c fs",
    "I'm you're they'll we've he'd it's don't",
    "I'M YOU'RE THEY'LL WE'VE HE'D IT'S DON'T O'Sullivan 'tis 'll'll",
    "'s 't 're 've 'm 'll 'd ''s 'x",
    "quote\u2019s curly \u2019ll \u2018single\u2019 \u201cdouble\u201d",
    "1 12 123 1234 12345 123456 1234567",
    "3.14159 1,000,000 0x1F 1e-9 v2.0.1 12:34:56",
    "abc123def456 1st 2nd x86_64 h264",
    "\u0661\u0662\u0663\u0664 \u0967\u0968\u0969 \u2460\u2461 \u00bd\u00be \u2162 \u00b2\u00b3",
    "na\u00efve caf\u00e9 \u00fcber Stra\u00dfe \u00c5ngstr\u00f6m \u0130stanbul",
    "cafe\u0301 e\u0301e\u0301 n\u0303o a\u0308\u0304 x\u0302y",
    "\u0301 leading mark \u0301\u0301 a \u0301",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002123\u4e2a",
    "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\u6f22\u5b57 "
    "\uff21\uff22\uff43\uff11\uff12",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u1112\u1161\u11ab",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 "
    "\u0643\u0650\u062a\u064e\u0627\u0628\u064c \u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! "
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd "
    "\U0001f1eb\U0001f1f7 \u2764\ufe0f 5\ufe0f\u20e3",
    "\U0001d573\U0001d58a\U0001d591\U0001d591\U0001d594 \U00010348 \U0002000b",
    "zero\u200bwidth\u200djoiner\ufeffbom soft\u00adhyphen",
    "private \ue000 use \ufffd replacement \uffff",
    "def f(x):\n    return x**2 + 1  # comment\n\n\nif __name__ == '__main__':\n\tf(3)\n",
    'for (int i=0;i<10;++i){a[i]+=b[i];}//end\n#include <stdio.h>\n{"key": [1, 2.5, null]}',
    "$100 + 20% = ~120? <tag attr='v'/> a|b ^c `code` \\n @user #tag under_score",
    "!!! ... --- ??? ,,, ;;; ))) ((( "
    "\u2026 \u2014 \u00bf\u00a1 \u20ac\u00a3\u00a5 \u2211\u222b \u2192",
    "http://example.com/a?b=c&d=e user@mail.org C:\\Users\\x ~/.bashrc",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<think>\nhmm\n</think>\n\nok",
    "text<|im_end|>more <|endoftext|> <repo_name>",
    "<|im_<|im_end|>end|> <think<think>> <unused_0>",
    "Donaudampfschifffahrtsgesellschaftskapit\u00e4nsm\u00fctze" * 4,
    "ab" * 400,
    " " * 65 + "x" + "\n" * 33 + "y",
    "hello hello world world the the the of of and and",
    " hello\n hello\n\n hello \n  world",
    "\x00\x01\x02\x07\x08\x1b\x7f control",
    "\u00df\u017f\u212a\u0131 's'\u017f \u212a",
    "a.b.c ...a !a ?b \n.c \n\n.d  .e",
    "x\n\n y\n \n z\r\r\nw \n",
    "Mr. O\u2019Neill said: \u201cYou can\u2019t.\u201d (1999\u20132024) \u00a73.2",
]

SPECIAL = [
    ("<|endoftext|>", 3),
    ("<|im_start|>", 3),
    ("<|im_end|>", 3),
    ("<repo_name>", 3),
    ("<think>", 4),
    ("</think>", 4),
    ("<unused_0>", 5),
]
# Whole words that no merge can build: only rules that ignore merges give them.
WHOLE = ["\u0120leading", "ideographic", "123"]


class Vocabulary(ctypes.c_void_p):
    """A vocabulary loaded by llama.cpp."""

    @classmethod
    def load(cls, path):
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, path
        return llama_cpp.llama_model_get_vocab(model)


def tokenize(vocabulary, text, parse_special=False):
    raw = text.encode()
    ids = (llama_cpp.llama_token * (len(raw) + 8))()
    n = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), False, parse_special)
    assert n >= 0
    return list(ids[:n])


def train():
    """Tokens, types and merges of the synthetic vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=9,
        show_progress=False,
    )
    pieces = [t[i : i + 24] for t in TEXTS for i in range(0, len(t), 8)]
    tokenizer.train_from_iterator(sorted(pieces), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    barred = {*WHOLE, *(text for text, _ in SPECIAL)}
    kept = []
    for merge in merges:
        parts = {*merge.split(" "), merge.replace(" ", "")}
        if barred.isdisjoint(parts):
            kept.append(merge)
        else:
            barred.add(merge.replace(" ", ""))
    merges = kept
    tokens = sorted(model["vocab"].keys() - barred, key=model["vocab"].get) + WHOLE
    types = [1] * len(tokens)
    tokens += [t for t, _ in SPECIAL]
    types += [k for _, k in SPECIAL]
    return tokens, types, merges


def write_gguf(path, pre, tokens, types, merges):
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def synthetic(rules):
    tokens, types, merges = train()
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for names in rules:
            found = []
            for name in names:
                path = Path(folder) / "v.gguf"
                write_gguf(path, name, tokens, types, merges)
                vocabulary = Vocabulary.load(path)
                found.append([tokenize(vocabulary, t) for t in TEXTS])
                special = [tokenize(vocabulary, t, True) for t in TEXTS]
                assert found[-1] == found[0], (names[0], name)
            ids[names[0]] = {"plain": found[0], "special": special}
    return {"tokens": tokens, "types": types, "merges": merges, "ids": ids}


def smollm2(path):
    """Ids and the needed part: merges that touch the texts, and the tokens they make."""
    reader = gguf.GGUFReader(path)
    tokens, types, merges = (
        reader.fields[f"tokenizer.ggml.{n}"].contents() for n in ("tokens", "token_type", "merges")
    )
    vocabulary = Vocabulary.load(path)
    missing = missing_bytes(tokens)
    texts = [t for t in TEXTS if not missing & set(t.encode())]
    plain = [tokenize(vocabulary, t) for t in texts]
    special = [tokenize(vocabulary, t, True) for t in texts]
    used, needed = set(), {i for row in plain + special for i in row}
    makers = {m.replace(" ", ""): m for m in reversed(merges)}
    open_tokens = {tokens[i] for i in needed}
    while open_tokens:
        text = open_tokens.pop()
        if text in makers and makers[text] not in used:
            used.add(makers[text])
            open_tokens.update(makers[text].split(" "))
    alphabet = {tokens.index(t) for t in tokens if len(t) == 1}
    kept = {tokens.index(t) for m in used for t in (*m.split(" "), m.replace(" ", ""))}
    kept |= needed | alphabet | {i for i, k in enumerate(types) if k != 1}
    return {
        "n_vocab": len(tokens),
        "tokens": {str(i): [tokens[i], types[i]] for i in sorted(kept)},
        "merges": [m for m in merges if m in used],
        "texts": texts,
        "ids": {"plain": plain, "special": special},
    }


def missing_bytes(tokens):
    have = set(tokens)
    table = {ord(c): b for b, c in byte_characters().items()}
    return {table[ord(c)] for c in map(chr, table) if c not in have}


def byte_characters():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def main():
    sys.path.insert(0, str(HERE.parents[2] / "src"))
    from sparkinfer.pretokenizers import PRE_TOKENIZERS

    rules = {}
    for name, rule in PRE_TOKENIZERS.items():
        rules.setdefault(rule, []).append(name)
    head = {"origin": ORIGIN, "command": COMMAND}
    for name, body in (
        ("synthetic", {"texts": TEXTS, **synthetic(list(rules.values()))}),
        ("smollm2", smollm2(sys.argv[1])),
    ):
        text = json.dumps(head | body, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
