from areal_core.chat.rows import read_prompt
from areal_core.workflows.settings import SingleTurnSettings


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, shift=0):
        self.asked = 0
        self._shift = shift

    def encode(self, text, add_special_tokens):
        self.asked += 1
        return [ord(letter) + self._shift for letter in text]


def test_the_prompt_of_a_group_is_tokenized_once_and_each_episode_has_its_own_tokens():
    tokenizer = Counting()
    found = [read_prompt(tokenizer, {"prompt": "ab"}, SingleTurnSettings()) for _ in range(8)]
    assert [(prompt.input_ids, prompt.text) for prompt in found] == [([97, 98], "ab")] * 8
    assert tokenizer.asked == 3, "once, and twice to know how texts begin"
    found[0].input_ids.append(7)
    assert read_prompt(tokenizer, {"prompt": "ab"}, SingleTurnSettings()).input_ids == [97, 98]


def test_another_tokenizer_has_other_tokens():
    assert read_prompt(Counting(), {"prompt": "ab"}, SingleTurnSettings()).input_ids == [97, 98]
    assert read_prompt(Counting(1), {"prompt": "ab"}, SingleTurnSettings()).input_ids == [98, 99]


def test_a_system_message_that_no_prompt_can_have_is_told_before_a_run():
    settings = SingleTurnSettings(system="Be brief.")
    assert "text that is continued as it is, which takes no workflow.system" in settings.check_row({"prompt": "1+1="})
    assert settings.check_row({"prompt": [{"role": "user", "content": "1+1="}]}) == ""
    assert SingleTurnSettings(system="Be brief.", chat_template="always").check_row({"prompt": "1+1="}) == ""
