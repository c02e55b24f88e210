"""The plug-in that vLLM finds: hooks of :mod:`asdsim.engines.vllm`, and a trace to record to where one is asked for."""

from __future__ import annotations


def register() -> None:
    """Put the hooks in place; nothing else is imported until an engine asks for a trace."""
    from ..engines.vllm import install

    install(None)
