"""ASD inside vLLM, as a plug-in of the group ``vllm.general_plugins``.

vLLM loads its plug-ins in every process. Until an engine asks for ASD nothing is changed in it: three methods look at
the engine's configuration and go on. It is asked for by ``additional_config={"asd": {...}}`` or by the environment
variables ``ASDSIM_POLICY`` and ``ASDSIM_TRACE``, see :func:`asdsim.engines.config.engine_config`; a request may have
its own ``asd_B``, ``asd_g`` and ``asd_M`` in ``extra_args`` (over HTTP ``vllm_xargs``).

Near-ties that the rule accepts are raised in the target's logits just before vLLM's own greedy verification, which then
accepts them; its kernels, bonus token and metrics stay its own. What cannot be served so is refused, at start or at the
request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from ...errors import EngineError
from ...files import dump_json
from ..config import EngineConfig, engine_config, request_policy
from ..ledger import Report, is_strict

TESTED = ("0.32.0",)
UNTESTED_ENV = "ASDSIM_UNTESTED"
"""Set to 1, an engine of another version is tried all the same."""

log = logging.getLogger("vllm.asdsim")
ADAPTERS: WeakSet[Any] = WeakSet()
"""Adapters of the model runners of this process."""

OpenRecorder = Callable[[EngineConfig, Mapping[str, Any]], Any]


def asked_of(vllm_config: Any) -> EngineConfig | None:
    """Return what an engine is asked to do; None where it is not asked for ASD.

    Raises
    ------
    EngineError
        See :func:`asdsim.engines.config.engine_config`.
    """
    more = getattr(vllm_config, "additional_config", None)
    asked = more.get("asd") if isinstance(more, Mapping) else None
    return engine_config(asked, os.environ, "additional_config['asd']")


def check_version(version: str) -> None:
    """Refuse a version of vLLM that the adapter was not tested with."""
    if version not in TESTED and os.environ.get(UNTESTED_ENV) != "1":
        raise EngineError(
            f"vLLM {version} is not among the tested versions ({', '.join(TESTED)})",
            fix=f"install a tested one, or set {UNTESTED_ENV}=1 and compare tokens at asd_B=0 with plain decoding",
        )


def check_engine(vllm_config: Any, config: EngineConfig) -> None:
    """Refuse an engine in which the rule could not decide.

    Raises
    ------
    EngineError
        Without speculation, and with drafts or a sampler that the lift does not reach.
    """
    speculative = vllm_config.speculative_config
    where = config.file or "additional_config['asd']"
    if speculative is None:
        raise EngineError("ASD was asked for, but the engine has no drafter", where=where, fix="set speculative_config")
    method = getattr(speculative, "rejection_sample_method", "standard")
    if method != "standard":
        raise EngineError(f"rejection_sample_method {method} decides by itself", where=where, fix="leave it out")
    tree = getattr(speculative, "speculative_token_tree", None)
    if tree and any(any(node) for node in _nodes(tree)):  # a second child somewhere
        raise EngineError("drafts are a tree", where=where, fix="draft a chain: leave speculative_token_tree out")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise EngineError("pipeline parallelism was not tested with ASD", where=where, fix="use tensor parallelism")


def _nodes(tree: Any) -> list[Any]:
    from ast import literal_eval

    return list(literal_eval(tree)) if isinstance(tree, str) else list(tree)


def request_setting(vllm_config: Any, params: Any, where: str) -> Any:
    """Return the setting of one request, checked; None where neither engine nor request asks for ASD.

    Raises
    ------
    EngineError
        If it cannot be served: sampling, or an engine that was not asked for ASD at start.
    """
    extra = params.extra_args or {}
    wants = any(str(key).startswith("asd_") for key in extra)
    config = asked_of(vllm_config)
    if config is None:
        if wants:
            raise EngineError(
                "the request asks for ASD, and the engine was started without it", where=where,
                fix="start it with additional_config={'asd': {...}} or ASDSIM_POLICY",
            )  # fmt: skip
        return None
    policy = request_policy(extra, config.policy, where)
    if params.temperature and not is_strict(policy):
        raise EngineError(
            f"temperature {params.temperature:g}: ASD verifies greedy decoding only", where=where,
            fix="set temperature to 0, or asd_B to 0 for vLLM's own verification",
        )  # fmt: skip
    return policy


def stop_ids_of(params: Any) -> list[int]:
    """Return the token ids that end a request."""
    eos = params.eos_token_id
    return [*(params.stop_token_ids or ()), *(() if eos is None else (eos,))]


def report_of(request_id: str) -> Report | None:
    """Return how a request stands, if a model runner of this process holds it."""
    for adapter in ADAPTERS:
        if request_id in adapter.ledger:
            report: Report = adapter.ledger.report(request_id)
            return report
    return None


def say(report: Report) -> None:
    """Log what became of a request; faults as errors."""
    line = dump_json(report.to_dict())
    if report.faults:
        log.error("asd: this request was not decoded as asked: %s", line)
    else:
        log.info("asd: %s", line)


def install(open_recorder: OpenRecorder | None = None) -> None:
    """Put the hooks in place; safe to call again.

    Parameters
    ----------
    open_recorder : callable, optional
        Opens a trace where one is asked for; see :class:`asdsim.engines.vllm.record.Recorder`.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _wrap(InputProcessor, "_validate_params", _validate)
    _wrap(WorkerWrapperBase, "init_device", lambda plain: _attach(plain, open_recorder))
    _wrap(Scheduler, "_free_request", _say_at_the_end)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name, None)
    if plain is None:
        raise EngineError(f"vLLM has no {owner.__name__}.{name}", fix="use a tested version of vLLM")
    if not getattr(plain, "_asdsim", False):
        wrapped: Any = wraps(plain)(make(plain))
        wrapped._asdsim = True
        setattr(owner, name, wrapped)


def _validate(plain: Any) -> Any:
    def validate(self: Any, params: Any, *rest: Any, **named: Any) -> Any:
        result = plain(self, params, *rest, **named)
        if hasattr(params, "temperature"):
            try:
                request_setting(self.vllm_config, params, "request")
            except EngineError as error:
                raise ValueError(f"asdsim: {error}") from None  # what vLLM answers with status 400
        return result

    return validate


def _attach(plain: Any, open_recorder: OpenRecorder | None) -> Any:
    def init_device(self: Any, *rest: Any, **named: Any) -> Any:
        config = asked_of(self.vllm_config)
        result = plain(self, *rest, **named)
        if config is not None:
            import vllm

            check_version(vllm.__version__)
            check_engine(self.vllm_config, config)
            ADAPTERS.add(adapt(self.worker.model_runner, self.vllm_config, config, open_recorder))
        return result

    return init_device


def adapt(runner: Any, vllm_config: Any, config: EngineConfig, open_recorder: OpenRecorder | None) -> Any:
    """Return the adapter of a model runner, in place.

    Raises
    ------
    EngineError
        If the runner is neither of the two that are known.
    """
    for module in ("v1", "v2"):
        from importlib import import_module

        kind = import_module(f"{__name__}.{module}").Adapter
        if kind.knows(runner):
            return kind(runner, vllm_config, config, open_recorder)
    raise EngineError(f"the model runner {type(runner).__name__} is not known", fix="use vLLM's V1 or V2 model runner")


def _say_at_the_end(plain: Any) -> Any:
    def free(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        transfer, encoder = plain(self, request, *rest, **named)
        report = report_of(request.request_id) if ADAPTERS else None
        if report is not None:
            transfer = {**(transfer or {}), "asd": report.to_dict()}
        return transfer, encoder

    return free
