"""Deliberate faults in this room; `tests/test_faults.py` shows that the tests catch each."""

from tests.fault import Fault

FAULTS = [
    # targets that are the inputs
    Fault(
        "lib/data/batches.py",
        "sequences[:, 1:].contiguous()",
        "sequences[:, :-1].contiguous()",
        "tests/data/test_batches.py",
    ),
    # the last sequence is never drawn
    Fault(
        "lib/data/batches.py",
        "generator.integers(len(dataset) - context_length, size=batch_size)",
        "generator.integers(len(dataset) - context_length - 1, size=batch_size)",
        "tests/data/test_batches.py",
    ),
    # all ranks see the same sequences
    Fault(
        "lib/data/batches.py",
        "first = self.windows_seen + self.rank * self.batch_size",
        "first = self.windows_seen",
        "tests/data/test_batches.py",
    ),
    # offsets computed ahead outlive a loaded position
    Fault(
        "lib/data/batches.py",
        "self._ahead = self._ahead[:0]",
        "pass",
        "tests/data/test_batches.py",
    ),
    # an epoch that reads beyond the end of the array
    Fault(
        "lib/data/batches.py",
        "last_offset = num_tokens - 1 - self.num_sequences * context_length",
        "last_offset = num_tokens - self.num_sequences * context_length",
        "tests/data/test_batches.py",
    ),
    # an array of another text counts as current
    Fault(
        "lib/data/token_array.py",
        "if any(getattr(manifest, k) != v for k, v in key.items()):",
        "if False:",
        "tests/data/test_token_array.py",
    ),
    # bytes written after the journal's last entry stay
    Fault(
        "lib/data/token_array.py",
        "out.truncate(HEADER_BYTES + done.tokens * dtype.itemsize)",
        "out.seek(0, 2)",
        "tests/data/test_token_array.py",
    ),
    # the manifest of an earlier array vouches for the new one
    Fault(
        "lib/data/token_array.py",
        "_manifest(output_path).unlink(missing_ok=True)",
        "pass",
        "tests/data/test_token_array.py",
    ),
    # validation stories come up in training
    Fault(
        "lib/data/stories.py",
        "if in_validation(text) == is_validation",
        "if in_validation(text) or not is_validation",
        "tests/data/test_stories.py",
    ),
    # hero and friend of the same name
    Fault(
        "lib/data/stories.py",
        "friend_name = friend_names[friend_index - 1]",
        "friend_name = friend_names[friend_index]",
        "tests/data/test_stories.py",
    ),
    # a separator that lies across two blocks is missed
    Fault(
        "lib/data/corpus.py",
        "keep = len(SEPARATOR) - 1",
        "keep = len(SEPARATOR) - 2",
        "tests/data/test_corpus.py",
    ),
    # a resumed download begins again at the front of the file
    Fault(
        "lib/data/corpus.py",
        '"ab" if resumed else "wb"',
        '"wb"',
        "tests/data/test_corpus.py",
    ),
    # U+FFFD in the text itself counts as an error
    Fault(
        "lib/data/corpus.py",
        "text.count(replacement) - (tail + block).count(replacement.encode())",
        "text.count(replacement)",
        "tests/data/test_corpus.py",
    ),
    # another vocabulary size keeps the old tokenizer
    Fault(
        "lib/data/prepare.py",
        '        "vocab_size": config.vocab_size,\n',
        "",
        "tests/data/test_prepare.py",
    ),
    # a model's tokenizer is overwritten
    Fault(
        "lib/data/prepare.py",
        'check(config, "output", not is_model,',
        'check(config, "output", True,',
        "tests/data/test_prepare.py::test_the_tokenizer_of_a_model_is_never_replaced",
    ),
    # arrays that another text made are overwritten
    Fault(
        "lib/data/prepare.py",
        "        if config.output is None:\n            keep_earlier",
        "        if False:\n            keep_earlier",
        "tests/data/test_prepare.py::test_arrays_of_unknown_origin_are_kept",
    ),
    # a damaged journal is believed
    Fault(
        "lib/data/token_array.py",
        "if text == _journal_text(key, done, digest):",
        'if json.loads(text)["key"] == key:',
        "tests/data/test_token_array.py::test_a_partial_file_of_something_else_is_begun_anew",
    ),
    # a sampler resumes before the first sequence
    Fault(
        "lib/data/batches.py",
        " or not 0 <= windows_seen < 2**62",
        "",
        "tests/data/test_batches.py::test_a_position_that_is_none_is_rejected_and_changes_nothing",
    ),
    # seed 0 is no seed
    Fault(
        "lib/data/batches.py",
        "generator = np.random.default_rng(generator)",
        "generator = generator or np.random.default_rng()",
        "tests/data/test_batches.py::test_a_seed_draws_the_same_batch_again",
    ),
    # a tokenizer of unknown origin is replaced
    Fault(
        "lib/data/prepare.py",
        "unknown = [path] if path.exists() and not _made_from(path) else []",
        "unknown = []",
        "tests/data/test_prepare.py::test_a_tokenizer_without_its_record_is_never_replaced",
    ),
]
