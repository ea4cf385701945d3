"""The list of skipped tests at the end of a run, and `pytest --expected-skips`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from support import skips

pytest_plugins = ["pytester"]

FILES = {
    "test_of_skipping": """
        import pytest

        @pytest.mark.parametrize("number", range(4))
        def test_numbers(number):
            if number > 1:
                pytest.skip(f"no machine with {number} cards")

        @pytest.mark.skip(reason="no compiler")
        def test_compiler(): ...

        @pytest.mark.xfail(reason="a known bug")
        def test_bug():
            raise ValueError
    """,
    "test_module": """
        import pytest

        pytest.skip("no browser", allow_module_level=True)
    """,
}
CARDS = '{tests = "test_of_skipping.py::test_numbers", reason = "no machine with * cards", most = 2}'
COMPILER = '{tests = "test_of_skipping.py", reason = "no compiler", most = 1}'
BROWSER = '{tests = "test_", reason = "no browser", most = 1}'
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs these files, with a file of these entries if there are any."""
    monkeypatch.setenv("PYTHONPATH", str(Path(skips.__file__).parents[1]))  # for workers
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*entries: str, files: Iterable[str] = FILES, workers: int = 0) -> pytest.RunResult:
        pytester.makepyfile(**{name: FILES[name] for name in files})
        options = ["-p", "support.skips"]
        if entries:
            Path("expected.toml").write_text(f"skips = [{', '.join(entries)}]")
            options += ["--expected-skips", "expected.toml"]
        if workers:
            return pytester.runpytest_subprocess(*options, "-p", "xdist", "-n", str(workers))
        return pytester.runpytest_inprocess(*options)

    return run


def test_the_run_ends_with_a_list_and_passes_if_no_file_says_what_may_be_skipped(run: Run):
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "Skipped: 4",
            "     1  no browser  (test_module.py)",
            "     1  no compiler  (test_of_skipping.py)",
            "     1  no machine with 2 cards  (test_of_skipping.py)",
        ]
    )
    result.stdout.no_fnmatch_line("*known bug*")


def test_a_run_passes_if_all_of_its_skips_are_expected(run: Run):
    result = run(CARDS, COMPILER, BROWSER)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*unexpected skips*")


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([CARDS, COMPILER], ["test_module.py: no browser"]),
        ([CARDS, BROWSER], ["test_of_skipping.py::test_compiler: no compiler"]),
        (
            [CARDS.replace("most = 2", "most = 1"), COMPILER, BROWSER],
            ["test_of_skipping.py::test_numbers[[]3]: no machine with 3 cards"],
        ),
        (
            [CARDS.replace("cards", "processors"), COMPILER, BROWSER],
            ["test_of_skipping.py::test_numbers[[]2]: *", "test_of_skipping.py::test_numbers[[]3]: *"],
        ),
        ([CARDS, COMPILER, BROWSER.replace("test_", "test_of_skipping")], ["test_module.py: no browser"]),
    ],
)
def test_a_run_fails_with_the_names_of_further_skips(run: Run, entries: list[str], names: list[str]):
    result = run(*entries)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"{len(names)} more than --expected-skips allows:", *(f"  {name}" for name in names)])


@pytest.mark.slow
def test_skips_of_all_workers_are_counted(run: Run):
    assert run(CARDS, COMPILER, BROWSER, workers=2).ret == 0
    result = run(CARDS.replace("most = 2", "most = 1"), COMPILER, workers=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["Skipped: 4", "2 more than --expected-skips allows:"])


def test_a_run_fails_if_all_its_tests_are_skipped(run: Run):
    result = run(CARDS, files=["test_module"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    # It prints the line that allows this.
    (line,) = (line for line in result.outlines if line.startswith("    {tests"))
    assert run(line, files=["test_module"]).ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("skips = [", "Invalid value"),
        ("skip = []", "the key skips"),
        ('skips = [{tests = "a", reason = "b"}]', "tests, reason and most"),
        ('skips = [{tests = "a", reason = "b", most = "3"}]', "tests, reason and most"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, complaint: str):
    (tmp_path / "skips.toml").write_text(text)
    with pytest.raises(pytest.UsageError, match=complaint):
        skips.read(tmp_path / "skips.toml")
    with pytest.raises(pytest.UsageError, match="No such file"):
        skips.read(tmp_path / "other.toml")
