"""Token ids equal llama.cpp's, frozen in data/tokenizer (origin and command are in the files)."""

import pytest
from tokenizer_files import golden, smollm2, synthetic

from sparkinfer.pretokenizers import PRE_TOKENIZERS
from sparkinfer.tokenizer import Tokenizer

SYNTHETIC = golden("synthetic")
RULES = sorted(SYNTHETIC["ids"])


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("pre", RULES)
def test_ids_of_every_pre_tokenizer(pre: str, special: bool) -> None:
    tokenizer = Tokenizer.from_gguf(synthetic(pre, add_bos_token=False))
    expected = SYNTHETIC["ids"][pre]["special" if special else "plain"]
    for text, ids in zip(SYNTHETIC["texts"], expected, strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=special) == ids, text
        assert tokenizer.decode(ids) == text


def test_every_name_has_a_golden_rule() -> None:
    assert {PRE_TOKENIZERS[name] for name in RULES} == set(PRE_TOKENIZERS.values())


def test_golden_texts_tell_the_rules_apart() -> None:
    plain = {str(SYNTHETIC["ids"][pre]["plain"]) for pre in RULES}
    cuts = {(PRE_TOKENIZERS[pre].patterns, PRE_TOKENIZERS[pre].ignore_merges) for pre in RULES}
    assert len(plain) == len(cuts)


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_ids_of_the_real_smollm2_vocabulary(special: bool) -> None:
    data = golden("smollm2")
    tokenizer = Tokenizer.from_gguf(smollm2())
    assert tokenizer.n_vocab == 49152
    for text, ids in zip(
        data["texts"], data["ids"]["special" if special else "plain"], strict=True
    ):
        assert tokenizer.encode(text, parse_special=special) == ids, text
        assert tokenizer.decode(ids) == text
