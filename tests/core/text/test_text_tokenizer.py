"""Loading, special tokens, BOS, and the sentences for tokenizers that cannot be used."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from ds_runtime.errors import CheckpointError, RequestError, UnsupportedError
from ds_runtime.text.tokenizer import Tokenizer


def test_special_ids_come_from_the_files(bpe):
    assert (bpe.bos_id, bpe.eos_ids) == (0, (1,))
    assert bpe.special_ids == {0, 1, 2}
    assert bpe.special_tokens["bos_token"] == "<｜begin▁of▁sentence｜>"
    user = bpe.backend.token_to_id("<｜User｜>")
    assert bpe.decode([0, user, 1], skip_special=True) == "<｜User｜>"


def test_eos_ids_are_the_union_of_all_files(bpe_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bpe_folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(tmp_path).eos_ids == (7, 5, 1)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ['"x"', "1.5", "[1, null]", "true"])
def test_an_end_token_that_is_no_number_is_named(bpe_folder, tmp_path, file, value):
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(CheckpointError, match=f"{file}: eos_token_id .*token id"):
        Tokenizer.load(tmp_path)


def test_bos_is_added_once_and_only_when_asked(bpe):
    plain = bpe.encode("Hello")
    assert plain[0] != 0
    assert bpe.encode("Hello", add_special=True) == [0, *plain]
    assert bpe.encode("<｜begin▁of▁sentence｜>Hello", add_special=True) == [0, *plain]
    assert bpe.encode("", add_special=True) == [0]


def test_agrees_with_transformers(bpe, bpe_folder):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(bpe_folder / "tokenizer.json"))
    text = "Hello 你好 <｜User｜> 123 👍"
    assert bpe.encode(text) == theirs.encode(text, add_special_tokens=False)
    ids = bpe.encode(text)
    assert bpe.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_token_bytes_and_text(bpe):
    ids = bpe.encode("Hello 你好 👍🏽")
    assert b"".join(bpe.token_bytes(t) for t in ids).decode() == "Hello 你好 👍🏽"
    assert bpe.token_bytes(10**6) == b""
    whole = bpe.encode("Hello")[0]
    assert bpe.token_text(whole) == bpe.decode([whole])
    part = next(t for t in range(bpe.vocab_size) if bpe.token_bytes(t) == b"\xe4")
    assert bpe.token_text(part) == "bytes:\\xe4"


def test_unpaired_surrogates_are_a_request_error(bpe):
    with pytest.raises(RequestError, match="unpaired surrogate at character 2"):
        bpe.encode("ab\ud800")


def test_missing_and_broken_files(bpe_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*Copy tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="an object is needed"):
        Tokenizer.load(tmp_path)


def test_other_decoders_are_refused(bpe_folder, tmp_path):
    backend = Backend.from_file(str(bpe_folder / "tokenizer.json"))
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="decoder Metaspace; only ByteLevel"):
        Tokenizer.load(tmp_path)


def test_model_with_its_post_processor_bos(bpe_folder, tmp_path):
    """Checkpoints whose tokenizer.json itself adds BOS do not get it twice."""
    from tokenizers import processors

    backend = Backend.from_file(str(bpe_folder / "tokenizer.json"))
    bos = "<｜begin▁of▁sentence｜>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("Hi", add_special=True).count(0) == 1
    assert tokenizer.encode(bos + "Hi", add_special=True).count(0) == 1
    assert tokenizer.encode("Hi").count(0) == 0
