import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from quire.text.tokenizer import Tokenizer

TEXTS = (
    st.text()
    | st.text("abé你👍🏽\u200d ▁\n.,!")
    | st.sampled_from(["<s>a</s>", "a <tool_call> b", "I don't , you see ."])
)


@pytest.mark.slow
@pytest.mark.sampled(4)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_encoding_equals_transformers(pair, text, add_special_tokens):
    ours, theirs = pair
    assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_decoding_equals_transformers(pair, data, skip_special_tokens):
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    assert ours.decode(ids, skip_special_tokens) == theirs.decode(ids, skip_special_tokens=skip_special_tokens)


def test_special_tokens_equal_transformers(pair):
    ours, theirs = pair
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.all_special_ids
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_tokens_that_only_the_configuration_knows_get_the_ids_transformers_gives(checkpoints, backends):
    config = {
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "image_token": "<image>",
        "extra_special_tokens": ["<tool_call>", "<think>"],
        "added_tokens_decoder": {
            "900": {"content": "<late>", "lstrip": True, "special": True},
            "800": {"content": "<early>", "special": False},
        },
    }
    ours, theirs = checkpoints.both(backends["byte level"], config)
    text = "a <late> <early><pad><image><think><tool_call>b<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == theirs.decode(theirs.encode(text), skip_special_tokens=skip)
    assert ours.special_tokens["image_token"] == "<image>"
    assert ours.id_to_token(ours.token_to_id("<think>")) == "<think>"
    assert ours.token_to_id("no such token") is None
    assert ours.id_to_token(99999) is None


def test_special_tokens_map_is_read_where_the_configuration_lacks_the_newer_table(checkpoints, backends):
    ours, theirs = checkpoints.both(backends["byte level"], {}, special_tokens_map__json={"eos_token": "<|im_end|>"})
    assert ours.eos_token_id == theirs.eos_token_id == ours.token_to_id("<|im_end|>")


@pytest.mark.parametrize("clean_up", [True, False])
def test_clean_up_of_spaces_equals_transformers(checkpoints, backends, clean_up):
    for backend in backends.values():
        ours, theirs = checkpoints.both(backend, {"clean_up_tokenization_spaces": clean_up})
        ids = theirs.encode("I do n't know , he said . It 's ' so ' !")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_checkpoint_that_was_saved_to_truncate_and_pad_does_neither(checkpoints):
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    tokenizer = Tokenizer.from_directory(checkpoints.write(backend))
    assert len(tokenizer.encode("b")) == 1


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_bos_and_eos_are_added_when_the_configuration_says_so_but_never_twice(checkpoints, backends, kind):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_directory(checkpoints.write(backends[kind], config))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]


def test_a_lone_surrogate_is_an_error_that_names_its_place(tokenizer):
    with pytest.raises(ValueError, match=r"character 2 is U\+D83D"):
        tokenizer.encode("ab\ud83d!")


def test_a_directory_without_a_tokenizer_is_an_error_that_says_what_was_looked_for(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"no tokenizer in {tmp_path}.*tokenizer.json, .*merges.txt, "):
        Tokenizer.from_directory(tmp_path)


def test_of_several_formats_tokenizer_json_counts(checkpoints, backends):
    others = {"merges__txt": "no merges", "tekken__json": "[]", "tokenizer__model": "nonsense"}
    path = checkpoints.write(backends["byte level"], **others)
    assert Tokenizer.from_directory(path).encode("a b") == backends["byte level"].encode("a b").ids


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_an_error_that_names_it(checkpoints, backends, name, content):
    path = checkpoints.write(backends["byte level"])
    (path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_directory(path)


def test_chat_templates_are_found_in_each_place_and_own_files_come_first(checkpoints, backends):
    def templates(config, **files):
        return Tokenizer.from_directory(checkpoints.write(backends["byte level"], config, **files))

    assert templates({}).chat_template is None
    assert templates({"chat_template": "config"}).chat_template == "config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert templates({"chat_template": named}).chat_templates == {"default": "plain", "tool_use": "tools"}
    processor = {"chat_template__json": {"chat_template": "processor"}}
    assert templates({"chat_template": "config"}, **processor).chat_template == "processor"
    assert templates({"chat_template": "config"}, **processor, chat_template__jinja="own").chat_template == "own"


def test_token_bytes_are_what_a_token_adds_to_a_text(sentencepiece_tokenizer, byte_level_tokenizer):
    for tokenizer, the in ((sentencepiece_tokenizer, "▁the"), (byte_level_tokenizer, "Ġthe")):
        assert tokenizer.token_bytes[tokenizer.token_to_id(the)] == b" the"
        assert tokenizer.token_bytes[tokenizer.eos_token_id] == b"</s>"
        assert tokenizer.token_bytes[99999] == b""
    assert sentencepiece_tokenizer.token_bytes[sentencepiece_tokenizer.token_to_id("<0xF0>")] == b"\xf0"
    assert byte_level_tokenizer.token_bytes[byte_level_tokenizer.token_to_id("ð")] == b"\xf0"


def test_an_added_token_keeps_its_own_spelling_in_byte_level_vocabularies(checkpoints, backends):
    backend = Backend.from_str(backends["byte level"].to_str())
    backend.add_tokens([AddedToken("grand père", normalized=False)])
    tokenizer = Tokenizer.from_directory(checkpoints.write(backend))
    [token_id] = tokenizer.encode("grand père")
    assert tokenizer.token_bytes[token_id].decode() == tokenizer.decode([token_id]) == "grand père"
