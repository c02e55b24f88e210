"""ASD for ``model.generate(custom_generate=FOLDER, trust_remote_code=True, ...)``; asdsim must be installed."""

from asdsim.engines.transformers.assisted import Assisted
from asdsim.rules.settings import Policy


def generate(model, inputs=None, policy=None, B=None, g=None, M=None, assistant_model=None, **named):  # type: ignore[no-untyped-def]
    """Generate under ``policy`` (a file of ``asdsim calibrate``) or under B, g and M; the rest is ``generate``'s own.

    Drafts come from ``assistant_model``, ``prompt_lookup_num_tokens`` or ``assistant_early_exit``.
    """
    if policy is None and None in (B, g, M):
        raise ValueError("give policy=FILE, or B, g and M")
    asd = Assisted(Policy(B, g, M) if policy is None else policy, assistant_model)
    named = {name: value for name, value in named.items() if value is not None}
    return model.generate(inputs, custom_generate=asd, **named)
