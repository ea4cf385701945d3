"""The files of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.server.batch_files import BatchFiles


def files(folder: Path, source: bytes, target: bytes | None = None, limit: int = 100) -> BatchFiles:
    (folder / "in").write_bytes(source)
    if target is not None:
        (folder / "out").write_bytes(target)
    return BatchFiles(folder / "in", folder / "out", limit)


def answer(number: int, custom_id: str | None, **error: str) -> bytes:
    fields = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": {}, "error": error or None}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


A, B = b'{"custom_id": "a"}\n', b'{"custom_id": "b"}\n'


@pytest.mark.parametrize("empty", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n", b"  \n"])
def test_an_empty_file_has_no_requests(tmp_path: Path, empty: bytes):
    batch = files(tmp_path, empty)
    assert (batch.num_requests, list(batch.unanswered())) == (0, [])


def test_lines_keep_their_numbers_between_empty_and_long_lines(tmp_path: Path):
    long = b'{"custom_id": "' + b"c" * 500 + b'"}\n'
    batch = files(tmp_path, b"\xef\xbb\xbf" + A[:-1] + b"\r\n\n" + long + b"\n" + B + long + b"no json")
    assert batch.num_requests == 5
    assert list(batch.unanswered()) == [(1, A[:-1]), (3, None), (5, B[:-1]), (6, None), (7, b"no json")]


def test_a_line_of_just_the_limit_is_read(tmp_path: Path):
    for end in (b"", b"\n", b"\r\n"):
        batch = files(tmp_path, b"x" * 100 + end + (b"y" if end else b""))
        assert [line for _, line in batch.unanswered()] == [b"x" * 100, *([b"y"] if end else [])]
        batch.close()
    assert list(files(tmp_path, b"x" * 103).unanswered()) == [(1, None)]


def test_a_repeated_custom_id_is_an_error_that_names_both_lines(tmp_path: Path):
    with pytest.raises(ValueError, match="in: line 5 has the same custom_id as line 3"):
        files(tmp_path, b"{}\n[]\n" + A + B + A + B)
    files(tmp_path, b"{}\n{}\nno json\nno json\n" + A)  # requests without a custom_id are not equal


def test_answered_lines_are_left_out(tmp_path: Path):
    batch = files(tmp_path, A + b"no json\n" + B, answer(3, "b") + answer(2, None, message="wrong"))
    assert list(batch.unanswered()) == [(1, A[:-1])]
    assert (batch.num_requests, batch.num_unanswered, batch.num_failed) == (3, 1, 1)
    batch.write(1, {"custom_id": "a", "response": None, "error": {"message": "x"}})
    assert (batch.num_unanswered, batch.num_failed) == (0, 2)
    batch.close()
    again = BatchFiles(tmp_path / "in", tmp_path / "out", 100)
    assert (again.num_unanswered, again.num_failed) == (0, 2)


def test_lines_that_are_added_while_the_batch_runs_are_left_for_the_next_run(tmp_path: Path):
    batch = files(tmp_path, A)
    with open(tmp_path / "in", "ab") as file:
        file.write(B)
    assert list(batch.unanswered()) == [(1, A[:-1])]


def test_a_torn_last_line_is_cut_wherever_it_was_torn(tmp_path: Path):
    whole, torn = answer(2, "b"), answer(1, "a")
    for length in range(1, len(torn)):
        batch = files(tmp_path, A + B, whole + torn[:length])
        assert list(batch.unanswered()) == [(1, A[:-1])]
        assert (tmp_path / "out").read_bytes() == whole
        batch.close()


@pytest.mark.parametrize(
    "foreign",
    [
        b"notes",
        b"notes\n",
        b"{}\n",
        A,
        answer(1, "b"),
        answer(3, "a"),
        answer(0, "b"),
        answer(-1, "a"),
        answer(1, "a") + answer(1, "a"),
        answer(1, "a").replace(b"batch_req_1", b"x"),
        answer(1, "a")[:9] + b"\n",
    ],
)
def test_an_output_with_other_content_is_an_error_and_stays_as_it_is(tmp_path: Path, foreign: bytes):
    with pytest.raises(ValueError, match=r"out: line \d is not an answer to a request in .*/in; name another output"):
        files(tmp_path, A + B, foreign)
    assert (tmp_path / "out").read_bytes() == foreign


def test_two_batches_cannot_write_the_same_file(tmp_path: Path):
    batch = files(tmp_path, A)
    with pytest.raises(ValueError, match="another quire run-batch is writing"):
        files(tmp_path, A)
    batch.close()
    files(tmp_path, A)


def test_a_folder_that_is_not_writable_is_an_error(tmp_path: Path):
    source = tmp_path / "in"
    source.write_bytes(A)
    with pytest.raises(OSError, match="/sys/out"):  # not even root can write into this folder
        BatchFiles(source, Path("/sys/out"), 100)


@pytest.mark.parametrize(
    "line",
    [
        b'"a"',
        b"null",
        b"[" * 90,
        b'{"custom_id": "\\ud800"}',
        b'{"custom_id": "\xff"}',
        b"\x00",
        b'{"custom_id": 1}',
        b'{"custom_id": {"a": 1}}',
        b'{"custom_id": 1e999}',
        b'{"body":' + b"[" * 80,
    ],
)
def test_a_line_that_is_no_request_is_still_a_request_to_be_answered(tmp_path: Path, line: bytes):
    batch = files(tmp_path, line + b"\n" + A, answer(1, None, message="wrong"))
    assert (batch.num_requests, list(batch.unanswered())) == (2, [(2, A[:-1])])
