"""`load`: from a name or a path to a model that is ready and its tokenizer.

Each source (a GGUF file, a Hugging Face folder) offers the same three things: `config`, `tokenizer()` and
`tensors()` under Hugging Face's names. Here the memory of the model is laid out once, and every tensor is copied to
its place in it: a query projection is some rows of the layer's one `qkv` matrix.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from minillm.fetch import default_model
from minillm.gguf_file import GGUFFile
from minillm.hf_folder import HFFolder
from minillm.model import Transformer
from minillm.native import native_model, require_shape
from minillm.quant_linear import QuantLinear, require_compute
from minillm.quantized_model import load_saved
from minillm.tokenizer import Tokenizer

DEFAULT = "smollm2-135m"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WEIGHTS = ("float", "native")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # derived numbers that old checkpoints carry along


def load(
    name_or_path: str | os.PathLike = DEFAULT,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    max_context: int | None = None,
    prepare: bool = True,
    packed: bool = False,
    weights: str = "float",
    compute: torch.dtype | None = None,
) -> tuple[Transformer, Tokenizer]:
    """Load a model and its tokenizer.

    name_or_path: "smollm2-135m" (fetched once, see minillm/fetch.py), a llama-style .gguf file, a Hugging Face folder
        of the Llama, Mistral, Qwen2 or Qwen3 family, a hub name such as "Qwen/Qwen3-0.6B", or a .safetensors file of a
        quantized model (quantized_model.py: save).
    device: where the model lives; when not given, a GPU if there is one.
    max_context: a limit in tokens below the model's own.
    prepare: call `model.prepare()` for inference; pass False to train.
    packed: on a CPU, keep a second copy of the weights in a layout that is quicker for batches: twice the memory.
    weights: "float" expands all weights to `dtype`; "native" computes with the 4 and 8 bits of a GGUF file (native.py).
    compute: the dtype of the products with quantized weights, whatever `dtype` is; on a CPU torch.bfloat16 is quick.

    Raises ValueError for a file that is damaged or not supported, OSError where there is none.
    """
    if max_context is not None and max_context < 1:
        raise ValueError(f"max_context must be at least 1, not {max_context}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_usable(dtype, device)
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    require_compute(compute)
    path = Path(name_or_path).expanduser()
    saved = path.suffix == ".safetensors" and path.is_file()
    if compute is not None and not saved and weights == "float":
        raise ValueError("compute is for weights that stay quantized: weights='native', or a saved quantized model")
    if saved:
        model, tokenizer = load_saved(path, dtype, device, max_context, compute)
        return (model.prepare(packed) if prepare else model), tokenizer
    source = open_source(name_or_path, max_context)
    tokenizer = source.tokenizer()  # before the weights: a missing tokenizer should not take seconds to notice
    if tokenizer.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {source.config.vocab_size}: "
            "they do not belong together"
        )
    if weights == "native":
        if not isinstance(source, GGUFFile):
            raise ValueError(f"weights='native' needs a GGUF file, and {str(name_or_path)!r} is a Hugging Face model")
        model = native_model(source, dtype, device, compute)
    else:
        model = Transformer(source.config, dtype=dtype, device=device)
        fill(model, source)
    return (model.prepare(packed) if prepare else model), tokenizer


def require_usable(dtype: torch.dtype, device: str | torch.device) -> None:
    """Refuse a dtype or a device that cannot be used, before seconds are spent on reading."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype!r}")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here ({reason})") from None


def open_source(name_or_path: str | os.PathLike, max_context: int | None) -> GGUFFile | HFFolder:
    path = default_model() if str(name_or_path).lower() == DEFAULT else Path(name_or_path).expanduser()
    if path.is_dir():
        return HFFolder(path, max_context)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} is neither a GGUF file nor a Hugging Face folder")
        return GGUFFile(path, max_context)
    name = str(name_or_path)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return HFFolder(from_hub(name), max_context)
    raise FileNotFoundError(
        f"there is no file or folder {name!r}; the default model is {DEFAULT!r}, a hub name has the form 'owner/name'"
    )


def from_hub(name: str) -> Path:
    """Download a model folder from the Hugging Face hub, where it can be reached, or find it in its cache."""
    from huggingface_hub import snapshot_download  # slow to import, seldom needed

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # many kinds: no such model, no access, no network
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"there is no folder {name!r} here, and the hub did not give that model ({first_line})") from None


def fill(model: Transformer, source: GGUFFile | HFFolder) -> None:
    """Copy every tensor of the source to its place; each place must be filled, and nothing may be left over."""
    places = destinations(model)
    filled: dict[str, int] = dict.fromkeys(places, 0)
    with torch.no_grad():
        for name, first_row, rows in source.tensors():
            if name.endswith(IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.config.tied_embeddings):
                continue
            if name not in places:
                raise ValueError(f"the checkpoint holds a tensor {name!r} that this kind of model does not have")
            place = places[name][first_row : first_row + len(rows)]
            require_shape(name, rows.shape, place.shape)
            place.copy_(rows)
            filled[name] += len(rows)
    for name, place in places.items():
        if filled[name] not in (0, len(place)):
            raise ValueError(f"tensor {name!r} has {filled[name]} rows, and {len(place)} were expected")
    missing = [name for name in places if not filled[name]]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks the tensor {missing[0]!r}{more}")


def destinations(model: Transformer) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: Hugging Face's name -> a view into the model's own memory."""
    if any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("this model's matrices are quantized: there is no float memory to view or to fill")
    config = model.config
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    places = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    if not config.tied_embeddings:
        places["lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.blocks):
        parts: dict[str, Tensor] = {
            "input_layernorm.weight": block.attention_norm.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
        }
        if config.qk_norm:
            parts["self_attn.q_norm.weight"] = block.attention.q_norm.weight
            parts["self_attn.k_norm.weight"] = block.attention.k_norm.weight
        linears = (
            (block.attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
            (block.attention.out, ("self_attn.o_proj",), (config.d_model,)),
            (block.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (config.d_ff, config.d_ff)),
            (block.mlp.down, ("mlp.down_proj",), (config.d_model,)),
        )
        for linear, names, sizes in linears:
            for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
                if parameter is not None:
                    rows = zip(names, parameter.split(sizes), strict=True)
                    parts.update({f"{name}.{kind}": part for name, part in rows})
        places.update({f"model.layers.{i}.{name}": part for name, part in parts.items()})
    return {name: place.detach() for name, place in places.items()}
