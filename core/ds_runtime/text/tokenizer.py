"""A checkpoint's tokenizer: text to ids, ids to text, and the bytes of every id."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.eos import eos_ids
from ds_runtime.checkpoint.files import LISTS, read_settings, read_text
from ds_runtime.errors import CheckpointError, RequestError, UnsupportedError
from ds_runtime.text.spelled import pieces, whole

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
Split: TypeAlias = Callable[[str, bool, str], list[int]]
_BATCHED = 4096  # characters from which encoding is worth a batch of its own


class Tokenizer:
    """A byte-level BPE tokenizer as Hugging Face lays it out.

    `bos_id` and `eos_ids` are what the checkpoint's files say (generation_config.json, config.json
    and tokenizer_config.json together). `special_tokens` maps names such as "bos_token" to their
    text, for templates. `special_ids` are the ids that `skip_special` leaves out. `split` stands in
    for the method of that name.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        settings: dict[str, Any],
        eos_ids: Sequence[int] = (),
        split: Split | None = None,
    ) -> None:
        _require_byte_level(backend)
        self.backend = backend
        self.settings = settings
        self.special_tokens = {n: t for n in _NAMED if (t := _content(settings.get(n)))}
        self.special_ids = frozenset(
            i for i, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *(() if own_eos is None else (own_eos,))]))
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._split = self.split if split is None else split

    @classmethod
    def load(cls, folder: str | Path, split: Split | None = None) -> Tokenizer:
        """Read tokenizer.json and its neighbours; CheckpointError names what is missing."""
        root = Path(folder)
        path = part_of(root, "tokenizer.json")
        if not path.exists():
            raise CheckpointError(
                f"{root}: no tokenizer.json. Copy tokenizer.json and tokenizer_config.json of the "
                "model into this folder, or save them with transformers' "
                "AutoTokenizer.save_pretrained"
            )
        try:
            backend = Backend.from_str(read_text(path, LISTS))
        except CheckpointError:
            raise
        except Exception as e:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {e}. Download the file again") from e
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            eos += eos_ids(part_of(root, name))
        settings = read_settings(part_of(root, "tokenizer_config.json"))
        return cls(backend, settings=settings, eos_ids=eos, split=split)

    def encode(self, text: str, add_special: bool = False, mark: str = "") -> list[int]:
        """Ids of `text`. `add_special` puts BOS first where the checkpoint asks for it. mark: a
        character that is left out, and after which no token begins that only templates write.

        Text that begins with BOS already does not get a second one. RequestError when the text
        holds unpaired surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(
                f"the text holds an unpaired surrogate at character {e.start}: send valid Unicode"
            ) from e
        ids = self._split(text, add_special, mark)
        if not add_special or self.bos_id is None:
            return ids
        if ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        if self.settings.get("add_bos_token") is True and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def least(self, text: str) -> int:
        """Tokens that `text` has at least, without encoding it: no token stands for more bytes than
        the longest. 0 where the tokenizer changes text first."""
        return len(text.encode(errors="replace")) // self._longest if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token, or a few more; 0: unknown, as text is changed first."""
        rules = json.loads(self.backend.to_str()).get("normalizer") or {}
        if rules.get("normalizers", [rules] if rules else []):
            return 0
        return max(len(token.encode()) for token in self.backend.get_vocab())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        texts: list[str] = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return texts[0]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; none for an id outside the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            text = self.backend.id_to_token(token)
            known = self._bytes[token] = b"" if text is None else _to_bytes(text)
        return known

    def whole_text(self, token: int) -> str | None:
        """The text that `token` stands for; None where its bytes are no whole characters."""
        if token not in self._texts:
            try:
                self._texts[token] = self.token_bytes(token).decode()
            except UnicodeDecodeError:
                self._texts[token] = None
        return self._texts[token]

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is `text`; None if there is none."""
        found: int | None = self.backend.token_to_id(text)
        return found

    def token_text(self, token: int) -> str:
        r"""A printable name of `token`: its text, or `bytes:\xe4\xbd` for part of a character."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def named_tokens(self) -> dict[str, str | None]:
        """The text of bos_token, eos_token, pad_token and unk_token; None for one that there is
        not. Where only ids say what ends a text, eos_token is that of the first."""
        found = {name: self.special_tokens.get(name) for name in _NAMED}
        if found["eos_token"] is None and self.eos_ids:
            found["eos_token"] = self.backend.id_to_token(self.eos_ids[0])
        return found

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """The texts that become tokens which only templates write, wherever they are. Characters
        that older tokenizers have as ordinary added tokens, such as õ, are not among them."""
        return tuple(t.content for t in self._control.values())

    @cached_property
    def _control(self) -> dict[int, AddedToken]:
        """Those tokens by their ids."""
        added: dict[int, AddedToken] = self.backend.get_added_tokens_decoder()
        return {i: t for i, t in added.items() if t.special or len(t.content) > 1}

    @cached_property
    def _spellings(self) -> dict[int, str]:
        """Those tokens by their ids, with their text where the model may make the id of other text:
        the letter "Ġ" as a token has the id of the space. Else ""."""
        own = self.backend.get_vocab(with_added_tokens=False)
        return {i: t.content if own.get(t.content) == i else "" for i, t in self._control.items()}

    def split(self, text: str, add_special: bool, mark: str = "") -> list[int]:
        """Ids of `text`, right as tokenizer.json makes them, in this process."""
        if mark:
            assert not add_special, "marks are of rendered text, which begins as it is to"
            return self._split_marked(whole(text, mark), mark)
        # The library lets other threads run only while it works on a batch.
        ids: list[int]
        if len(text) > _BATCHED:
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        else:
            ids = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def _split_marked(self, text: str, mark: str) -> list[int]:
        found = self.backend.encode(text, add_special_tokens=False)
        out: list[int] = []
        for said, ids in pieces(text, mark, found.ids, found.offsets, self._spellings):
            out += ids if said is None else self._split_text(said)
        return out

    def _split_text(self, text: str) -> list[int]:
        """Ids of `text` where no token is known that only templates write."""
        plain, own = self._plain
        return [own.get(i, i) for i in plain.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _plain(self) -> tuple[Backend, dict[int, int]]:
        """The same tokenizer without those tokens, and what the ids are here of added ones that it
        has under others. The model itself is shared."""
        plain = Backend(self.backend.model)
        if (normalizer := self.backend.normalizer) is not None:
            plain.normalizer = normalizer
        if (cut := self.backend.pre_tokenizer) is not None:
            plain.pre_tokenizer = cut
        added = self.backend.get_added_tokens_decoder()
        ordinary = {i: t for i, t in sorted(added.items()) if i not in self._control}
        plain.add_tokens([*ordinary.values()])
        ids = {t.content: i for i, t in ordinary.items()}
        return plain, {i: ids[t.content] for i, t in plain.get_added_tokens_decoder().items()}

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        found: int | None = None if text is None else self.backend.token_to_id(text)
        return found


def _content(value: Any) -> str | None:
    """A special token's text, which the files give as a string or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _require_byte_level(backend: Backend) -> None:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    kinds = [str(p.get("type")) for p in parts]
    if kinds != ["ByteLevel"]:
        raise UnsupportedError(
            f"tokenizer.json: decoder {' + '.join(kinds)}; only ByteLevel (every DeepSeek "
            "tokenizer) is supported"
        )


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable bytes stand for themselves, others for 256, 257, …"""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    # As the decoder does it: a token with one foreign letter is taken as plain text.
    letters = [_ALPHABET.get(c) for c in token]
    if any(b is None for b in letters):
        return token.encode()
    return bytes(b for b in letters if b is not None)
