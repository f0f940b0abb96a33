"""A request on its way through several servers: what is kept, how tokens are labeled, what is asked for next."""

from __future__ import annotations

import pytest
import torch

from areal_core.data.trajectory import FinishReason
from areal_core.inference.adapter import Chunk
from areal_core.inference.answer import Answer, Conversations, PartialTokens
from areal_core.servers import GenerationRequest, Grant, SamplingParameters, ServerLostError


def answer(seed=7, name="r1", conversation="", conversations=None, on_tokens=None, **sampling):
    settings = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    request = GenerationRequest(name, [1, 2, 3], settings, seed, conversation=conversation, on_tokens=on_tokens)
    return Answer(request, conversations or Conversations("recompute"))


def grant(version=4, *, labels_tokens=True, run_id=""):
    return Grant("a", "http://a", version, run_id, labels_tokens, 1024, 100)


def tokens(*ids, finish=None, spans=None, first=None, **settings):
    """Of a partial generation that came in two chunks, the first with labels for some of its tokens."""
    made = PartialTokens(grant(**settings), SamplingParameters(max_new_tokens=1000), 3)
    known = 0 if first is None else first[-1][2]
    made.add(Chunk(list(ids[:known]), [-1.0] * known, None, first))
    made.add(Chunk(list(ids[known:]), [-1.0] * (len(ids) - known), finish, spans))
    return made


def test_the_next_partial_asks_for_what_is_missing():
    asked = answer(min_new_tokens=6)
    first = asked.next_partial(grant(4))
    assert (first.name, first.input_ids, first.sampling.max_new_tokens) == ("r1.1", [1, 2, 3], 10)
    asked.keep(tokens(11, 12, 13, 14), [4] * 4)
    assert asked.finish is None
    second = asked.next_partial(grant(5))
    assert (second.name, second.input_ids) == ("r1.2", [1, 2, 3, 11, 12, 13, 14])
    assert (second.sampling.max_new_tokens, second.sampling.min_new_tokens) == (6, 2)
    asked.keep(tokens(15, 16, 17), [5] * 3)
    assert asked.next_partial(grant(5)).sampling.min_new_tokens == 0
    asked.keep(tokens(18, 19, 20, finish="length"), [5] * 3)
    found = asked.generation()
    assert found.output_ids == list(range(11, 21))
    assert found.versions == [4] * 4 + [5] * 6
    assert len(found.logprobs) == 10
    assert found.finish_reason is FinishReason.LENGTH


def test_seeds_of_later_pieces_differ_and_are_repeatable():
    def seeds(seed):
        asked, found = answer(seed), []
        for _ in range(5):
            found.append(asked.next_partial(grant(0)).seed)
            asked.keep(tokens(11, 12), [0, 0])
        return found

    assert seeds(7)[0] == 7, "the first partial generation has the request's own"
    assert len(set(seeds(7) + seeds(8))) == 10
    assert seeds(7) == seeds(7)
    assert all(0 <= seed < 1 << 63 for seed in seeds(7))


def test_a_partial_that_brought_nothing_is_asked_for_again_with_the_same_seed():
    asked = answer()
    first = asked.next_partial(grant(0))
    asked.keep(tokens(), [])
    second = asked.next_partial(grant(0))
    assert (first.seed, first.input_ids) == (second.seed, second.input_ids)
    assert first.name != second.name, "no name is used twice"


@pytest.mark.parametrize(
    "sampling", [{"stop": ("x",)}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}]
)
def test_what_looks_at_its_own_output_begins_anew(sampling):
    """A server knows only the tokens that it is sent: half a stop text, or what was penalized, would be forgotten."""
    asked = answer(**sampling)
    asked.next_partial(grant(4))
    asked.keep(tokens(11, 12), [4, 4])
    second = asked.next_partial(grant(5))
    assert (second.input_ids, second.sampling.max_new_tokens, second.name) == ([1, 2, 3], 10, "r1.2")
    assert len(asked.sampled) == 0


def test_the_caller_sees_each_token_once_as_soon_as_it_is_certain_to_be_kept():
    seen = []
    asked = answer(on_tokens=seen.append)
    partial = PartialTokens(grant(), SamplingParameters(max_new_tokens=10), 3)
    partial.add(Chunk([11, 12, 13], [-1.0] * 3, None, [("4", 0, 2)]))
    asked.show(partial)
    assert [list(ids) for ids in seen] == [[11, 12]], "the third token has no label yet"
    asked.show(partial)
    partial.add(Chunk([14, 15], [-1.0] * 2, None, [("4", 0, 4)]))
    asked.keep_labeled(partial)  # the server is lost
    rest = PartialTokens(grant(labels_tokens=False), SamplingParameters(max_new_tokens=6), 3)
    rest.add(Chunk([16], [-1.0]))
    asked.next_partial(grant())
    asked.show(rest)
    rest.add(Chunk([17], [-1.0], "stop"))
    asked.keep(rest, rest.versions())
    assert [list(ids) for ids in seen] == [[11, 12], [13, 14], [16], [17]]
    assert asked.generation().output_ids == [11, 12, 13, 14, 16, 17]


def test_an_error_of_the_caller_is_no_fault_of_the_server():
    asked = answer(on_tokens={}.__getitem__)
    asked.next_partial(grant())
    with pytest.raises(RuntimeError, match="on_tokens raised TypeError"):
        asked.keep(tokens(11, 12), [4, 4])


def test_an_answer_fails_if_its_caller_has_seen_tokens_that_are_not_kept():
    seen = []
    asked = answer(on_tokens=seen.append)
    partial = PartialTokens(grant(), SamplingParameters(max_new_tokens=10), 3)
    partial.add(Chunk([11, 12], [-1.0] * 2, None, [("4", 0, 2)]))
    asked.show(partial)
    partial.add(Chunk([1000], [-1.0]))  # of a vocabulary of 100: nothing of this server is kept
    asked.show(partial)
    assert [list(ids) for ids in seen] == [[11, 12]]
    with pytest.raises(ValueError, match="a server failed after the caller had received its tokens"):
        asked.next_partial(grant())


@pytest.mark.parametrize("sampling", [{"stop": ("x",)}, {"repetition_penalty": 1.1}])
def test_tokens_that_another_server_could_not_continue_are_not_shown(sampling):
    asked = answer(on_tokens=pytest.fail, **sampling)
    partial = tokens(11, 12, spans=[("4", 0, 2)])
    asked.show(partial)
    asked.keep(partial, partial.versions())


def test_the_answer_ends_as_its_last_partial_does():
    asked = answer()
    asked.keep(tokens(11, finish="abort"), [4])
    assert asked.finish is None, "somebody stopped it"
    asked.keep(tokens(12, finish="stop"), [4])
    assert asked.finish is FinishReason.STOP


def test_an_answer_with_all_its_tokens_has_ended_even_if_its_server_did_not_say_so():
    asked = answer(max_new_tokens=2)
    asked.keep(tokens(11, 12), [4, 4])
    assert asked.finish is FinishReason.LENGTH


def test_an_end_among_uncertain_tokens_is_none():
    """The server was lost with the last chunk: what ended it may be among the tokens that are not kept."""
    asked = answer()
    asked.keep_labeled(tokens(11, 12, 13, finish="stop", first=[("4", 0, 2)]))
    assert asked.finish is None
    assert (asked.sampled.ids.tolist(), asked.sampled.versions.tolist()) == ([11, 12], [4, 4])
    asked.keep_labeled(tokens(11, 12, finish="stop", spans=[("5", 0, 2)]))
    assert asked.finish is FinishReason.STOP
    asked.keep_labeled(tokens(13, spans=[("another run's 5", 0, 1)]))
    assert asked.sampled.versions.tolist() == [4, 4, 5, 5]


def test_labels_are_those_of_the_spans():
    found = tokens(11, 12, 13, first=[("4", 0, 1)], spans=[("4", 0, 2), ("5", 2, 3)])
    assert found.versions().tolist() == [4, 4, 5]
    found = tokens(11, 12, 13, run_id="a-", spans=[("a-4", 0, 2), ("a-5", 2, 3)])
    assert found.versions().tolist() == [4, 4, 5]


def test_without_labels_all_tokens_are_of_the_version_of_the_slot():
    assert tokens(11, 12, version=4, labels_tokens=False).versions().tolist() == [4, 4]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (None, "labels 0 of 3 tokens"),
        ([("4", 0, 1)], "labels 1 of 3 tokens"),
        ([("4", 0, 1), ("5", 2, 3)], "labels 1 of 3 tokens"),
        ([("4", 1, 3)], "labels 0 of 3 tokens"),
        ([("default", 0, 3)], "labels 0 of 3 tokens.*'default'"),
        ([("-1", 0, 3)], "labels 0 of 3 tokens.*'-1'"),
    ],
)
def test_labels_that_cannot_be_right(spans, words):
    with pytest.raises(ServerLostError, match=words):
        tokens(11, 12, 13, spans=spans).versions()


def test_spans_may_reach_further_than_what_was_sent():
    assert tokens(11, 12, spans=[("4", 0, 3)]).versions().tolist() == [4, 4]


@pytest.mark.parametrize(
    ("ids", "logprobs", "words"),
    [
        ([11, 12], [-1.0], "3 tokens with 2 log-probabilities"),
        ([11, 12, 13, 14], [-1.0] * 4, "5 tokens where 4 were asked for"),
        ([11], [7.5], "7.5 as a log-probability"),
        ([11], [float("nan")], "nan as a log-probability"),
        ([11], [float("-inf")], "-inf as a log-probability"),
        ([-1], [-1.0], "-1 as a token"),
        ([100], [-1.0], "100 as a token of 100"),
    ],
)
def test_what_nobody_has_sampled_is_a_fault_of_the_server(ids, logprobs, words):
    found = PartialTokens(grant(), SamplingParameters(max_new_tokens=4), 3)
    found.add(Chunk([10], [0.0]))
    assert not found.fault()
    found.add(Chunk(ids, logprobs))
    assert words in found.fault()


@pytest.mark.parametrize(("ids", "logprobs"), [([11], [None]), ([11], ["-1"]), ([1.0], [-1.0]), ([1 << 63], [-1.0])])
def test_what_is_no_token_at_all_is_a_fault_of_the_server(ids, logprobs):
    with pytest.raises(ServerLostError, match="sent invalid tokens"):
        PartialTokens(grant(), SamplingParameters(max_new_tokens=4), 3).add(Chunk(ids, logprobs))


def test_in_recompute_prefixes_are_shared_only_between_requests_of_one_version():
    conversations = Conversations("recompute")
    asked = answer(conversation="a", conversations=conversations)
    assert asked.next_partial(grant(4)).cache_salt == "4"
    assert asked.next_partial(grant(5)).cache_salt == "5", "the same request, continued"
    later = answer(name="r2", conversation="a", conversations=conversations)
    assert later.next_partial(grant(6)).cache_salt == "6", "its next turn"


def test_in_keep_cache_a_conversation_keeps_its_prefix_and_a_new_one_begins_with_current_weights():
    conversations = Conversations("keep_cache")
    first = answer(conversation="a", conversations=conversations)
    assert first.next_partial(grant(4)).cache_salt == "4"
    assert first.next_partial(grant(5)).cache_salt == "4", "the same request, continued"
    later = answer(name="r2", conversation="a", conversations=conversations)
    assert later.next_partial(grant(6)).cache_salt == "4", "its next turn"
    other = answer(name="r3", conversation="b", conversations=conversations)
    assert other.next_partial(grant(6)).cache_salt == "6", "no older keys and values for who begins now"


def test_a_request_without_a_conversation_is_one_by_itself():
    conversations = Conversations("keep_cache")
    asked = answer(conversations=conversations)
    assert [asked.next_partial(grant(version)).cache_salt for version in (4, 5)] == ["4", "4"]
    assert answer(name="r2", conversations=conversations).next_partial(grant(5)).cache_salt == "5"
    named = answer(name="r3", conversation="r1", conversations=conversations)
    assert named.next_partial(grant(6)).cache_salt == "6", "a conversation of the same name as a request is another one"


def test_conversations_that_were_silent_longest_are_forgotten():
    conversations = Conversations("keep_cache", remembered=2)
    for name in "ab":
        conversations.salt(name, 1)
    assert conversations.salt("a", 2) == "1"
    conversations.salt("c", 2)
    assert [conversations.salt(name, 3) for name in "ac"] == ["1", "2"]
    assert conversations.salt("b", 3) == "3", "it begins anew, and finds no older keys and values"


def told(count, value):
    """What a partial generation tells of so many tokens, its input's among them."""
    column = torch.full((count, 1, 2), value, dtype=torch.uint8)
    column[0] = 0
    return {"routed_experts": column}


def partial_of(*ids, columns=None, finish=None):
    made = PartialTokens(grant(), SamplingParameters(max_new_tokens=1000), 3)
    made.add(Chunk(list(ids), [-1.0] * len(ids), finish, None, columns or {}))
    return made


def test_columns_of_pieces_go_on_where_those_before_end():
    asked = answer()
    asked.keep(partial_of(11, 12, columns=told(5, 7)), [4, 4])
    asked.keep(partial_of(13), [4])  # it was aborted, and tells nothing
    asked.keep(partial_of(14, 15, columns=told(8, 9), finish="stop"), [5, 5])
    column = asked.generation().columns["routed_experts"]
    assert column[:, 0, 0].tolist() == [0, 7, 7, 7, 7, 9, 9, 9]


def test_columns_of_tokens_that_are_not_kept_are_left_out():
    asked = answer()
    asked.keep(partial_of(11, 12, 13, columns=told(6, 7), finish="stop"), [4])
    assert asked.columns["routed_experts"][:, 0, 0].tolist() == [0, 7, 7, 7]


def test_an_answer_that_begins_anew_forgets_its_columns():
    asked = answer(stop=("x",))
    asked.next_partial(grant(4))
    asked.keep(partial_of(11, columns=told(4, 7)), [4])
    asked.next_partial(grant(5))
    assert asked.columns == {}


def partial_with_tops(*ids, finish=None, spans=None, labels_tokens=True):
    """A partial generation in chunks of one token, whose likeliest tokens are itself and the one after it."""
    made = PartialTokens(grant(labels_tokens=labels_tokens), SamplingParameters(max_new_tokens=1000, top_logprobs=2), 3)
    for number, token in enumerate(ids, 1):
        is_last = number == len(ids)
        made.add(Chunk([token], [-1.0], finish if is_last else None, spans, {}, [token, token + 1], [-1.0, -2.0]))
    return made


def test_likeliest_tokens_follow_the_tokens_of_resumed_pieces():
    asked = answer(top_logprobs=2)
    assert asked.next_partial(grant()).sampling.top_logprobs == 2
    interrupted = partial_with_tops(11, 12, 13, finish="stop", spans=[("4", 0, 2)])
    asked.keep_labeled(interrupted)  # the version of the last token is not certain
    assert asked.finish is None
    assert asked.next_partial(grant()).sampling.top_logprobs == 2
    last = partial_with_tops(14, 15, finish="stop", spans=[("5", 0, 2)])
    assert not last.fault()
    asked.keep(last, last.versions())
    found = asked.generation()
    assert found.output_ids == [11, 12, 14, 15]
    assert found.versions == [4, 4, 5, 5]
    assert found.top_ids.tolist() == [[11, 12], [12, 13], [14, 15], [15, 16]]
    assert found.top_logprobs.tolist() == [[-1.0, -2.0]] * 4


def test_an_answer_that_starts_again_forgets_its_likeliest_tokens():
    asked = answer(top_logprobs=2, stop=("x",))
    asked.keep_labeled(partial_with_tops(11, 12, labels_tokens=False))
    assert len(asked.sampled.top_ids) == 4
    asked.next_partial(grant())
    assert len(asked.sampled.top_ids) == 0


@pytest.mark.parametrize(("requested", "tops"), [(2, 0), (2, 1), (2, 3), (0, 2)])
def test_another_number_of_likeliest_tokens_is_a_fault_of_the_server(requested, tops):
    made = PartialTokens(grant(), SamplingParameters(max_new_tokens=9, top_logprobs=requested), 3)
    made.add(Chunk([11, 12], [-1.0, -1.0], "stop", None, {}, [5] * (2 * tops), [-2.0] * (2 * tops)))
    assert f"instead of {2 * requested} each" in made.fault()


@pytest.mark.parametrize("tops", [([None], [-1.0]), ([5], ["-1"]), ([1 << 40], [-1.0])])
def test_likeliest_tokens_that_are_no_numbers_are_a_fault_of_the_server(tops):
    made = PartialTokens(grant(), SamplingParameters(max_new_tokens=9, top_logprobs=1), 3)
    with pytest.raises(ServerLostError, match="sent invalid tokens"):
        made.add(Chunk([11], [-1.0], None, None, {}, *tops))


def partial_with_prompt(*ids, values=(-0.5, -0.25), requested=True, finish=None):
    """A partial generation in two chunks. The first has log-probabilities of a prompt with three tokens."""
    made = PartialTokens(grant(), SamplingParameters(max_new_tokens=1000, prompt_logprobs=requested), 3)
    made.add(Chunk(ids[:1], [-1.0] * len(ids[:1]), prompt_logprobs=values))
    made.add(Chunk(ids[1:], [-1.0] * len(ids[1:]), finish))
    return made


def test_log_probabilities_of_the_prompt_are_requested_until_a_token_is_kept():
    asked = answer(prompt_logprobs=True)
    assert asked.next_partial(grant()).sampling.prompt_logprobs
    asked.keep(partial_with_prompt(values=()), [])  # an update interrupted the prefill
    assert asked.next_partial(grant()).sampling.prompt_logprobs
    asked.keep(partial_with_prompt(11, 12), [4, 4])
    assert not asked.next_partial(grant()).sampling.prompt_logprobs, "the rest continues without them"
    asked.keep(tokens(13, finish="stop"), [5])
    found = asked.generation()
    assert (found.output_ids, found.prompt_logprobs) == ([11, 12, 13], [-0.5, -0.25])


def test_an_answer_that_starts_again_has_the_prompt_of_its_own_weights():
    asked = answer(prompt_logprobs=True, stop=("x",))
    asked.keep(partial_with_prompt(11, values=(-0.5, -0.5)), [4])
    assert asked.next_partial(grant(5)).sampling.prompt_logprobs
    asked.keep(partial_with_prompt(21, values=(-0.75, -0.125), finish="stop"), [5])
    assert (asked.generation().output_ids, asked.generation().prompt_logprobs) == ([21], [-0.75, -0.125])


def test_an_answer_without_a_request_for_them_has_no_log_probabilities_of_the_prompt():
    asked = answer()
    asked.keep(tokens(11, finish="stop"), [4])
    assert asked.generation().prompt_logprobs is None


@pytest.mark.parametrize(
    ("requested", "values", "fault"),
    [
        (True, (), "0 log-probabilities of the prompt instead of 2"),
        (True, (-0.5,), "1 log-probabilities of the prompt instead of 2"),
        (False, (-0.5, -0.25), "2 log-probabilities of the prompt instead of 0"),
        (True, (-0.5, 0.5), "0.5 as a log-probability"),
        (True, (-0.5, float("nan")), "nan as a log-probability"),
    ],
)
def test_wrong_log_probabilities_of_the_prompt_are_a_fault_of_the_server(requested, values, fault):
    assert partial_with_prompt(11, values=values, requested=requested).fault() == fault


def test_log_probabilities_of_the_prompt_that_are_no_numbers_are_a_fault_of_the_server():
    with pytest.raises(ServerLostError, match="sent invalid tokens"):
        partial_with_prompt(11, values=(None, -0.5))
