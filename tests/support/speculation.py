"""Speculation in the engines of tests that do not ask for it: `pytest --speculate Mixed`.

Tests that compare texts are marked `texts`, and only they run so. Those of them for which drafts make a difference by
design are marked `plain`, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import hf_config
from quire.config.engine import EngineConfig, canonical_name
from quire.models.registry import spec_of
from quire.scheduler.speculation import Speculation
from support.proposers import PROPOSERS, TARGET, speculate, target_options

CHOICES = (*PROPOSERS, "draft_model")  # the latter is the tested model itself, so nearly all drafts are right


class Everywhere:
    """A plugin of pytest: all engines that are made in this process speculate, unless they choose for themselves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_drafts = self.num_accepted = 0  # of the test that runs, by engines in this process
        create, verified = EngineConfig.create.__func__, Speculation.verified  # type: ignore[attr-defined]

        def create_with_drafts(cls: type[EngineConfig], **options: Any) -> EngineConfig:
            given = {canonical_name(option): value for option, value in options.items()}
            if given.get("speculative_config") is None:
                if given.get("async_scheduling") and name in PROPOSERS:
                    pytest.skip("async_scheduling: proposers on the host need the results of a step before the next")
                if name == "draft_model" and self.has_states(given):
                    pytest.skip("a draft model with recurrent layers is refused")
                options["speculative_config"] = self.config(given)
            return create(cls, **options)  # type: ignore[no-any-return]

        def count(speculation: Speculation, request: Any, num_drafts: int, num_accepted: int) -> None:
            self.num_drafts += num_drafts
            self.num_accepted += num_accepted
            verified(speculation, request, num_drafts, num_accepted)

        EngineConfig.create = classmethod(create_with_drafts)  # type: ignore[method-assign, assignment]
        Speculation.verified = count  # type: ignore[method-assign]

    @staticmethod
    def has_states(options: dict[str, Any]) -> bool:
        directory = Path(str(options.get("model") or bundled_model()))
        return directory.is_dir() and spec_of(hf_config(directory, {})).has_states

    def config(self, options: dict[str, Any]) -> dict[str, Any]:
        """The option speculative_config for an engine with these options."""
        model = str(options.get("model") or bundled_model())
        if self.name != "draft_model":
            os.environ[TARGET] = target_options({**options, "model": model})
            return speculate(self.name)
        config = {"method": "draft_model", "model": model, "num_speculative_tokens": 4, "adaptive": False}
        return {**config, **{field: options[field] for field in ["quantization"] if options.get(field)}}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [i for i in items if i.get_closest_marker("texts") and not i.get_closest_marker("plain")]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("drafts", (self.num_drafts, self.num_accepted)))
            self.num_drafts = self.num_accepted = 0
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = [report for reports in terminalreporter.stats.values() for report in reports]
        counts = [dict(report.user_properties)["drafts"] for report in reports if _is_teardown(report)]
        drafts, accepted = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
        tests = sum(num_drafts > 0 for num_drafts, _ in counts)
        terminalreporter.write_line(
            f"{self.name}: {drafts:,} drafts in {tests} tests, of which {accepted:,} were accepted"
        )


def _is_teardown(report: Any) -> bool:
    return getattr(report, "when", None) == "teardown" and "drafts" in dict(report.user_properties)
