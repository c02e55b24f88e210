"""The models that a trace was captured with, loaded again and held against its manifest."""

from __future__ import annotations

from typing import Any

from ..engines.protocol import Drafter, Target
from ..errors import CaptureError
from ..trace.manifest import Manifest
from .record import Recorder


def load_pair(
    manifest: Manifest, *, target: str | None = None, drafter: str | None = None, offline: bool = False
) -> tuple[Any, Any]:
    """Load target and drafter of a trace.

    Parameters
    ----------
    manifest : Manifest
    target, drafter : str, optional
        Where they are now, if no longer under the recorded names; their weights must be the same.
    offline : bool
        Use only what is on this machine.

    Raises
    ------
    CaptureError
        If a model cannot be had, or is not the one that the trace was captured with.
    """
    from ..engines.transformers.load import load_target
    from .drafters import check_head, make_drafter

    recorded = manifest.target
    loading = {"dtype": recorded.get("dtype", "auto"), "device": recorded.get("device", "auto"), "offline": offline}
    logits_dtype = "float32" if recorded.get("logits_dtype") != recorded.get("dtype") else "model"
    revision = recorded.get("revision") if "source" not in recorded else None
    spec = drafter or str(manifest.drafter["name"])
    keep = bool(manifest.settings.get("divergences"))
    overrides = manifest.drafter.get("overrides")
    drafting = dict(loading)
    if drafter is None and overrides is not None:  # a head: its repository may have moved on
        drafting["revision"] = manifest.drafter.get("revision")
    checkpoint = check_head(spec, overrides=overrides, **drafting)
    model = load_target(target or str(recorded["name"]), logits_dtype=logits_dtype, revision=revision, **loading)
    other = make_drafter(spec, model, keep_logits=keep, overrides=overrides, checkpoint=checkpoint, **drafting)
    check_same(model, other, manifest)
    return model, other


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
                    f"the trace was captured with {kind} {recorded.get('name')}, {key} {recorded.get(key)!r}; "
                    f"at hand{here} is {at_hand.get(key)!r}",
                    fix="use the model, its config.json, revision, dtype and device of the capture",
                )


def check_exact(drafter: Drafter, manifest: Manifest) -> None:
    """Refuse to complete a trace whose steps are not functions of the prefix as the model sees it.

    Raises
    ------
    CaptureError
        If the drafter remembers more than the prefix, or logits were recorded behind a processor.
    """
    if not drafter.memoryless:
        raise CaptureError(
            f"drafter {drafter.name} remembers more than the prefix, so a missing step cannot be computed on its own",
            fix="run each setting live with asdsim capture --rule asd",
        )
    processors = manifest.target.get("logits_processors") or manifest.settings.get("logits_processors")
    if processors:
        raise CaptureError(
            f"the trace's logits were recorded behind a processor ({processors}), so no replay of it is exact",
            fix="capture without processors, or replay with --off-trace aligned for an estimate",
        )


def recorder_of(manifest: Manifest) -> Recorder:
    """Return a recorder that keeps what the trace's steps hold."""
    return Recorder(max(manifest.top_k, 8), tuple(manifest.settings.get("divergences", ())))
