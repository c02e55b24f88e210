"""The models that a trace was captured with, loaded again and held against its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engines.protocol import Drafter, Target
from ..engines.transformers.load import BUILT_IN, QUANTIZED, check_placing
from ..errors import CaptureError, UsageError
from ..records import RequestRecord
from ..trace.manifest import Manifest
from .memory import Load, Memory, check_memory, plan_memory, pretended_devices
from .record import Recorder


@dataclass(frozen=True)
class Placing:
    """How the models of a trace are to be laid out, where not as the trace records it.

    Attributes
    ----------
    device_map, tp, quantize : optional
        See :func:`asdsim.engines.transformers.load.load_model`. A quantisation can only be the recorded one.
    memory : str
        ``check``: refuse to load what does not fit; ``ignore``; ``plan`` is for :func:`plan_pair`.
    """

    device_map: str | None = None
    tp: int | None = None
    quantize: str | None = None
    memory: str = "check"

    def __post_init__(self) -> None:
        check_placing("auto", self.device_map, self.tp, self.quantize)
        check_memory(self.memory)


def load_pair(
    manifest: Manifest,
    *,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    load: Load | None = None,
) -> tuple[Any, Any]:
    """Load target and drafter of a trace.

    Parameters
    ----------
    manifest : Manifest
    target, drafter : str, optional
        Where they are now, if no longer under the recorded names; their weights must be the same.
    offline : bool
        Use only what is on this machine.
    placing : Placing, optional
        How to lay them out; as recorded where left out.
    load : Load, optional
        What they will have to hold: what does not fit is refused before it is loaded.

    Raises
    ------
    CaptureError
        If a model cannot be had, does not fit, or is not the one that the trace was captured with.
    """
    from ..engines.transformers.load import load_target
    from .drafters import check_head, make_drafter

    placing = placing or Placing()
    if placing.memory.startswith("plan"):
        raise UsageError("--fit plan loads nothing to run", fix="give it to capture or cover")
    recorded = manifest.target
    loading = {"dtype": recorded.get("dtype", "auto"), "device": recorded.get("device", "auto"), "offline": offline}
    layout = layout_of(manifest, placing)
    logits_dtype = "float32" if recorded.get("logits_dtype") != recorded.get("dtype") else "model"
    revision = recorded.get("revision") if "source" not in recorded else None
    spec = drafter or str(manifest.drafter["name"])
    keep = bool(manifest.settings.get("divergences"))
    overrides = manifest.drafter.get("overrides")
    drafting = dict(loading)
    if drafter is None and overrides is not None:  # a head: its repository may have moved on
        drafting["revision"] = manifest.drafter.get("revision")
    checkpoint = check_head(spec, overrides=overrides, **drafting)
    name = target or str(recorded["name"])
    if load is not None and placing.memory != "ignore" and name not in BUILT_IN:
        memory = plan_pair(manifest, load, target=target, drafter=drafter, offline=offline, placing=placing)
        memory.refuse(name)
        layout["places"] = layout["places"] or memory.places or None
    model = load_target(name, logits_dtype=logits_dtype, revision=revision, **{**loading, **layout})
    other = make_drafter(spec, model, keep_logits=keep, overrides=overrides, checkpoint=checkpoint, **drafting)
    check_same(model, other, manifest)
    return model, other


def layout_of(manifest: Manifest, placing: Placing) -> dict[str, Any]:
    """Return arguments of ``load_target``: what is asked for, or else what the trace records.

    Raises
    ------
    CaptureError
        If another quantisation is asked for than that of the trace, whose weights are others.
    """
    recorded = manifest.target.get("quantization")
    if placing.quantize is not None and QUANTIZED[placing.quantize] != recorded:
        raise CaptureError(
            f"the trace was captured with {recorded or 'weights that are not quantised'}, and --quantize "
            f"{placing.quantize} has others",
            fix="leave --quantize out: the recorded one is used",
        )
    layout: dict[str, Any] = {"device_map": placing.device_map, "tp": placing.tp, "places": None}
    if placing.device_map is None and placing.tp is None:
        was = manifest.notes.get("placement") or {}
        layout |= {"device_map": was.get("device_map"), "tp": was.get("tp")}
        if layout["device_map"] not in (None, "auto"):  # a file, which may be gone
            layout["places"] = {module: place for place, modules in was["places"].items() for module in modules}
    layout["quantize"] = next((name for name, what in QUANTIZED.items() if what == recorded), None)
    if layout["device_map"] is not None:
        layout["device"] = "auto"
    return layout


def plan_pair(
    manifest: Manifest,
    load: Load,
    *,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
) -> Memory:
    """Return the memory that the models of a trace take, without loading them; parameters as :func:`load_pair`."""
    from .drafters import check_head

    placing = placing or Placing()
    recorded, spec = manifest.target, drafter or str(manifest.drafter["name"])
    overrides = manifest.drafter.get("overrides")
    drafting: dict[str, Any] = {"offline": offline}
    if drafter is None and overrides is not None:
        drafting["revision"] = manifest.drafter.get("revision")
    return plan_memory(
        target or str(recorded["name"]), spec, load, checkpoint=check_head(spec, overrides=overrides, **drafting),
        devices=pretended_devices(placing.memory),
        revision=recorded.get("revision") if "source" not in recorded else None,
        dtype=recorded.get("dtype", "auto"), offline=offline,
        **{"device": recorded.get("device", "auto"), **layout_of(manifest, placing)},
    )  # fmt: skip


def live_load(manifest: Manifest, records: Sequence[RequestRecord]) -> Load:
    """Return what models have to hold to decode requests one by one."""
    K = manifest.num_draft_tokens
    return Load(K, max((len(one.prompt_ids) + one.max_new_tokens for one in records), default=0) + K)


def check_same(target: Target, drafter: Drafter, manifest: Manifest) -> None:
    """Refuse models that are not those of the trace.

    Raises
    ------
    CaptureError
        Naming the first difference. A name or revision may differ where the checksum of the weights is the same;
        what config.json says of the computation may not.
    """
    for kind, recorded, at_hand in (
        ("target", manifest.target, target.describe()),
        ("drafter", manifest.drafter, drafter.describe()),
    ):
        same_weights = "weights_sha256" in recorded and recorded["weights_sha256"] == at_hand.get("weights_sha256")
        keys = recorded.keys() | at_hand.keys()
        if "engine" in manifest.settings:  # which knows less of its models, and names them its own way
            keys = recorded.keys() - {"name"}
        for key in sorted(keys, key=lambda key: (key != "weights_sha256", key)):
            if same_weights and key in ("name", "model", "checkpoint", "revision", "source", "source_sha256"):
                continue
            if key == "config_sha256" and key not in recorded:  # older traces do not say
                continue
            if recorded.get(key) != at_hand.get(key):
                here = "" if recorded.get("name") == at_hand.get("name") else f" ({at_hand.get('name')})"
                raise CaptureError(
                    f"the trace was captured with {kind} {recorded.get('name')}, {key} {recorded.get(key)!r}, but "
                    f"here{here} it is {at_hand.get(key)!r}",
                    fix="use the model, its config.json, revision, dtype and device of the capture",
                )


def check_exact(drafter: Drafter, manifest: Manifest) -> None:
    """Refuse to complete a trace whose steps are not functions of the prefix as the model sees it.

    Raises
    ------
    CaptureError
        If the drafter remembers more than the prefix, or logits were recorded after a processor.
    """
    if not drafter.memoryless:
        raise CaptureError(
            f"drafter {drafter.name} remembers more than the prefix, so a missing step cannot be computed on its own",
            fix="run each setting live with asdsim capture --rule asd",
        )
    processors = manifest.target.get("logits_processors") or manifest.settings.get("logits_processors")
    if processors:
        raise CaptureError(
            f"the trace's logits were recorded after a processor ({processors}), so no replay of it is exact",
            fix="capture without processors, or replay with --off-trace aligned for an estimate",
        )


def recorder_of(manifest: Manifest) -> Recorder:
    """Return a recorder that keeps what the trace's steps hold."""
    return Recorder(max(manifest.top_k, 8), tuple(manifest.settings.get("divergences", ())))
