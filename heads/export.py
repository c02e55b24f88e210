"""Writes a draft head as a serving engine loads it: with the projection that here is borrowed from the target.

    python -m heads.export heads/smollm2-eagle3 --to vllm -o exported/smollm2-eagle3
    python -m heads.export heads/smollm2-medusa --to vllm -o exported/smollm2-medusa

- EAGLE3, for vLLM and SGLang, in SafeAILab's layout: the target's rows of the draft vocabulary become
  ``lm_head.weight``, without which vLLM accepts nothing. vLLM counts the layers to read as Transformers does, SGLang
  from the first layer's output.
- Medusa, for vLLM: all heads share one projection over the whole vocabulary (``original_lm_head``), stored as that of
  the first head. vLLM loads no ``token_map`` with it, so it is left out, and such a head drafts from all tokens.

What an engine would not compute as here is refused. Weights keep the dtype of the checkpoint; the projection has the
target's, or near-ties would fall the other way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from asdsim.capture.drafters import check_overrides, parse_layer_ids
from asdsim.capture.drafters.configuration import refuse_unread, rope_of, windows_of
from asdsim.capture.drafters.eagle3 import Eagle3
from asdsim.capture.drafters.formats import Checkpoint, read_checkpoint
from asdsim.capture.drafters.heads import head_class, output_head
from asdsim.capture.drafters.medusa import Medusa
from asdsim.engines.transformers.load import load_model
from asdsim.errors import AsdsimError, UsageError
from asdsim.files import dump_json, write_atomically

ENGINES = ("vllm", "sglang")
Tensors = dict[str, torch.Tensor]


def vocabulary_maps(token_ids: torch.Tensor, vocab: int) -> Tensors:
    """Return ``d2t`` (offsets) and ``t2d``."""
    return {
        "d2t": token_ids - torch.arange(len(token_ids)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, token_ids, True),
    }


def export(checkpoint: Checkpoint, target_model: Any, engine: str, folder: Path, **overrides: Any) -> None:
    """Write a head for an engine: ``model.safetensors`` and ``config.json``.

    Parameters
    ----------
    checkpoint : Checkpoint
    target_model : transformers.PreTrainedModel
        That the head was made for.
    engine : {"vllm", "sglang"}
    folder : Path
        New, or empty.
    **overrides
        ``layer_ids`` and ``rope_theta``, where the checkpoint does not say them.

    Raises
    ------
    AsdsimError
        If the head cannot be read, or the engine would compute something else.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("the directory is not empty", where=str(folder), fix="choose another -o")
    refuse_unread(checkpoint)
    head = head_class(checkpoint.kind).from_checkpoint(checkpoint, target_model, **overrides)
    if isinstance(head, Eagle3):
        tensors, config = eagle3(checkpoint, head, engine, overrides.get("rope_theta"))
    elif isinstance(head, Medusa) and engine == "vllm":
        tensors, config = medusa(checkpoint, head, output_head(target_model))
    else:
        raise checkpoint.error(f"a head of kind {head.kind} cannot be exported for {engine}")
    stored = next(tensor.dtype for tensor in checkpoint.tensors.values() if tensor.is_floating_point())
    own = {tensor.data_ptr() for tensor in head.state_dict().values()}
    copies = {
        name: tensor.detach().to("cpu", stored if tensor.data_ptr() in own else tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    config["dtype"] = str(stored).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(copies, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", dump_json(config, indent=1) + "\n")


def eagle3(checkpoint: Checkpoint, head: Eagle3, engine: str, theta: float | None) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and configuration of an EAGLE3 head in SafeAILab's layout."""
    weights = head.state_dict()
    (window,) = windows_of(checkpoint, 1)
    rope = rope_of(checkpoint, theta, window.layer_type)
    extra = {
        "norms of queries and keys": "layer.self_attn.q_norm.weight" in weights, "EAGLE-1 and 2": head.early,
        "a bias of fc": "fc.bias" in weights, "norm_output": head.norm_output,
    }  # fmt: skip
    if engine == "sglang":
        extra |= {
            "norm_before_residual": head.norm_before_residual,
            "norms before fc": hasattr(head, "fc_norm") or hasattr(head, "input_norm"),
            "windows": window.size is not None, "biases": "layer.self_attn.q_proj.bias" in weights,
        }  # fmt: skip
    unread = [what for what, there in extra.items() if there]
    if unread:
        raise checkpoint.error(f"{engine} does not read {unread[0]} of an EAGLE3 head of Llama's kind")
    tensors = {name.replace("layer.", "midlayer.", 1): tensor for name, tensor in weights.items()}
    if "lm_head.weight" not in tensors and getattr(head.borrowed.output, "bias", None) is not None:
        raise checkpoint.error("the target's projection has a bias, which no engine reads of a head")
    tensors.setdefault("lm_head.weight", head.borrowed.output.weight)
    rows = len(tensors["lm_head.weight"])
    if head.token_ids is not None:
        tensors |= vocabulary_maps(head.token_ids.cpu(), head.vocab_size)
    attention = head.layer.self_attn
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": head.fc.out_features, "target_hidden_size": head.hidden_size,
        "intermediate_size": head.layer.mlp.up_proj.out_features, "num_hidden_layers": 1,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim, "head_dim": attention.head_dim,
        "vocab_size": head.vocab_size, "draft_vocab_size": rows, "tie_word_embeddings": False,
        "hidden_act": head.layer.mlp.config.hidden_act, "rms_norm_eps": head.norm.variance_epsilon,
        "attention_bias": "layer.self_attn.q_proj.bias" in weights, "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "max_position_embeddings": head.trained_positions,
        "norm_before_residual": head.norm_before_residual, "fc_norm": hasattr(head, "fc_norm"),
        "norm_before_fc": hasattr(head, "input_norm"),
    }  # fmt: skip
    if window.size is not None:
        config |= {"layer_types": [window.layer_type], "sliding_window": window.size, "use_sliding_window": True}
    key = "eagle_aux_hidden_state_layer_ids"
    if engine == "vllm":
        config[key] = list(head.taps)
    else:
        config["eagle_config"] = {key: [tap - 1 for tap in head.taps], "use_aux_hidden_state": True}
    return tensors, {key: value for key, value in config.items() if value is not None}


def medusa(checkpoint: Checkpoint, head: Medusa, target_output: Any) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and configuration of Medusa heads that share one projection, or have one each."""
    if len(head.outputs) and head.token_ids is not None:
        raise checkpoint.error("its projections have the rows of its token_map only, and vLLM needs all")
    blocks = len(head.blocks[0])
    tensors = {
        f"{i}.{j}.linear.{name}": tensor
        for i, layers in enumerate(head.blocks)
        for j, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }
    outputs = list(head.outputs) or [target_output]
    if getattr(outputs[0], "bias", None) is not None:
        raise checkpoint.error("the target's projection has a bias, which vLLM does not read")
    tensors |= {f"{i}.{blocks}.weight": output.weight for i, output in enumerate(outputs)}
    return tensors, {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size, "truncated_vocab_size": head.vocab_size, "num_heads": len(head.blocks),
        "num_hidden_layers": blocks, "medusa_fc_bias": head.blocks[0][0].bias is not None,
        "original_lm_head": len(outputs) == 1,
    }  # fmt: skip


def main() -> None:
    """Export one head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="file, directory or hub repository")
    parser.add_argument("--to", choices=ENGINES, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="of the target, and so of the projection")
    parser.add_argument("--draft-layer-ids", help="as for asdsim capture")
    parser.add_argument("--draft-rope-theta", type=float, help="likewise")
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    options = parser.parse_args()
    given = {
        "layer_ids": parse_layer_ids(options.draft_layer_ids) if options.draft_layer_ids else None,
        "rope_theta": options.draft_rope_theta,
    }
    try:
        checkpoint = read_checkpoint(options.head, offline=options.offline)
        check_overrides(checkpoint.kind, given)
        model = load_model(options.target, dtype=options.dtype, device="cpu", offline=options.offline).model
        given = {key: value for key, value in given.items() if value is not None}
        export(checkpoint, model, options.to, options.output, **given)
    except AsdsimError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{options.output}: {checkpoint.kind} head for {options.to}, target {options.target}")


if __name__ == "__main__":
    main()
