"""Read a Hugging Face folder: `config.json`, `*.safetensors`, `tokenizer.json`.

safetensors only: a pickle can run code when it is opened. Tensors are memory-mapped and copied one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as Backend
from torch import Tensor

from minillm.config import config_from_hf
from minillm.tokenizer import Tokenizer


class HFFolder:
    """`config`, `tokenizer()` and `tensors()` of one folder."""

    def __init__(self, folder: Path, max_context: int | None = None):
        self.folder = folder
        raw = self.read_json("config.json")
        if raw is None:
            raise ValueError(f"{folder} has no config.json: not a model folder in Hugging Face's layout")
        self.raw = raw
        self.config = config_from_hf(raw, max_context)
        self.files = self.weight_files()

    def read_json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} does not hold a JSON object")
        return content

    def weight_files(self) -> list[Path]:
        """All shards that the index names, or the one file, or every safetensors file there is."""
        index = self.read_json("model.safetensors.index.json")
        if index is not None:
            files = [self.folder / name for name in sorted(set(index.get("weight_map", {}).values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ValueError(f"{self.folder} lacks {', '.join(missing)}, named in model.safetensors.index.json")
        elif (self.folder / "model.safetensors").is_file():  # alone: some makers add a copy in a layout of their own
            files = [self.folder / "model.safetensors"]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            pickles = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*"))
            hint = "; it has pickled weights, which minillm never opens: convert them to safetensors" if pickles else ""
            raise ValueError(f"{self.folder} has no *.safetensors file{hint}")
        return files

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer that the tokenizers library reads ({error})") from None
        settings = self.read_json("tokenizer_config.json") or {}
        special = {name: token_text(settings.get(name)) for name in ("bos_token", "eos_token")}
        return Tokenizer(
            backend,
            end_ids=self.end_ids(),
            chat_template=self.chat_template(settings),
            special={name: text for name, text in special.items() if text is not None},
        )

    def end_ids(self) -> tuple[int, ...]:
        """generation_config.json knows best: chat models often end a turn with another token than a text."""
        for source in (self.read_json("generation_config.json") or {}, self.raw):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        return ()

    def chat_template(self, settings: dict[str, Any]) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        return template

    def tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name, 0, tensor) for every tensor of every shard."""
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a dict)
                        yield name, 0, shard.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{file} is not a complete safetensors file ({error})") from None


def token_text(token: str | dict[str, Any] | None) -> str | None:
    """A special token as tokenizer_config.json writes it: its text, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token
