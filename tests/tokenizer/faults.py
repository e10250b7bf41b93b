"""Deliberate faults in this room; `tests/test_faults.py` shows that the tests catch each."""

from tests.fault import Fault

FAULTS = [
    # the last pair of a word is not merged
    Fault(
        "lib/tokenizer/bpe.py",
        "merged, index, last = [], 0, len(ids) - 1",
        "merged, index, last = [], 0, len(ids) - 2",
        "tests/tokenizer/test_bpe.py::test_known_merges",
    ),
    # of equally frequent pairs, the least is merged
    Fault(
        "lib/tokenizer/bpe.py",
        "bytes(range(255, -1, -1))",
        "bytes(range(256))",
        "tests/tokenizer/test_bpe.py::test_known_merges",
    ),
    # a stale count is merged
    Fault(
        "lib/tokenizer/bpe.py",
        "if pair_counts[pair] != -negative_count:",
        "if pair_counts[pair] > -negative_count:",
        "tests/tokenizer/test_bpe.py::test_known_merges",
    ),
    # merges are replayed in any order
    Fault(
        "lib/tokenizer/bpe.py",
        "pair = min(known, key=self._ranks.__getitem__)",
        "pair = known[0]",
        "tests/tokenizer/test_bpe.py::test_ids_equal_those_of_the_definition[python]",
    ),
    # a token that the border of two pieces cuts in two stays so
    Fault(
        "lib/tokenizer/bpe.py",
        "while ids and used < len(piece) and not",
        "while ids and used < len(piece) and False and not",
        "tests/tokenizer/test_bpe.py::test_a_pretoken_in_pieces_has_the_ids_of_the_whole",
    ),
    # ids of 65,536 do not fit 16 bits
    Fault(
        "lib/tokenizer/bpe.py",
        "np.uint16 if self.vocab_size <= 1 << 16 else",
        "np.uint16 if self.vocab_size <= (1 << 16) + 1 else",
        "tests/tokenizer/test_bpe.py::test_dtype_follows_the_vocabulary",
    ),
    # letters that are younger than Unicode 16.0 are letters
    Fault(
        "lib/tokenizer/pretokenize.py",
        'letter = _pinned(r"\\p{L}", LETTERS, ascii_range="a-zA-Z")',
        'letter = r"\\p{L}"',
        "tests/tokenizer/test_pretokenize.py",
    ),
    # the shortest special token wins
    Fault(
        "lib/tokenizer/pretokenize.py",
        "sorted(special_tokens, key=len, reverse=True)",
        "sorted(special_tokens, key=len)",
        "tests/tokenizer/test_pretokenize.py",
    ),
    # a chunk ends inside a special token
    Fault(
        "lib/tokenizer/pretokenize.py",
        "if not any(token in region for token, region in zip(special_tokens, nearby)):",
        "if True:",
        "tests/tokenizer/test_pretokenize.py",
    ),
    # a chunk ends before bytes that may complete a character
    Fault(
        "lib/tokenizer/pretokenize.py",
        "if cut + 1 + margin > len(data):",
        "if cut + 1 > len(data):",
        "tests/tokenizer/test_pretokenize.py",
    ),
    # files with other merges have the same fingerprint
    Fault(
        "lib/tokenizer/files.py",
        'if (actual := fingerprint(parts)) != document.get("sha256"):',
        'if (actual := fingerprint(parts)) and "sha256" not in document:',
        "tests/tokenizer/test_files.py",
    ),
    # a contraction that the text ends with is cut in two
    Fault(
        "lib/tokenizer/compiled_scan.py",
        "    if i + 1 < end:\n        b = data[i + 1]",
        "    if i + 2 < end:\n        b = data[i + 1]",
        "tests/tokenizer/test_compiled.py::test_the_scanner_splits_as_the_pattern_does",
    ),
    # the end of a window is taken for that of a pre-token
    Fault(
        "lib/tokenizer/compiled_scan.py",
        "valid = ALL_ONES if room >= WINDOW else (ONE << np.uint64(room)) - ONE",
        "valid = (ONE << np.uint64(min(room, WINDOW - 1))) - ONE",
        "tests/tokenizer/test_compiled.py::test_nothing_changes_at_the_border_of_a_window",
    ),
    # halves of surrogate pairs pass for UTF-8
    Fault(
        "lib/tokenizer/compiled_scan.py",
        "or (b == 0xED and second > 0x9F)",
        "or (b == 0xED and second > 0xBF)",
        "tests/tokenizer/test_compiled.py::test_utf8_is_checked_as_python_checks_it",
    ),
    # a word counted in two chunks keeps the count of the second
    Fault(
        "lib/tokenizer/compiled_words.py",
        "counts[word] += count\n                break",
        "counts[word] = count\n                break",
        "tests/tokenizer/test_compiled.py::test_counts_survive_full_tables_and_threads",
    ),
    # a pair is taken for another one with the same tag
    Fault(
        "lib/tokenizer/compiled_pretoken.py",
        "if found & TAG == tag and ranks.pairs[rank] == key:",
        "if found & TAG == tag:",
        "tests/tokenizer/test_compiled.py",
    ),
    # a new token is not looked up with the one before it
    Fault(
        "lib/tokenizer/compiled_pretoken.py",
        "merge_rank(ranks, ids[before], merged)",
        "merge_rank(ranks, ids[before], ids[after])",
        "tests/tokenizer/test_compiled.py::test_words_of_every_length_have_the_ids_of_the_python_code",
    ),
    # wide ids are cached as if they were narrow
    Fault(
        "lib/tokenizer/compiled_encoder.py",
        "if number * width < 16 and length <= LONGEST_KEY:",
        "if number * 2 < 16 and length <= LONGEST_KEY:",
        "tests/tokenizer/test_compiled.py::test_words_of_every_length_have_the_ids_of_the_python_code",
    ),
]
