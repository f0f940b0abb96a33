"""The page of `areal view`: the tokens of a group."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = pytest.mark.slow


def test_the_panel_has_every_number_of_a_token(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    step = run_data["rollout_steps"][-1]
    one = run_data["rollouts"][str(step)][1]
    page = open_page(run_data, f"#tokens/{step}/{one['group_id']}")
    index = one["turn"].index(0) + 5
    page.locator(f".sequence [data-sequence='1'][data-token='{index}']").hover()
    expected = {name: values[index] for name, values in one["columns"].items()}
    rows = page.locator("#panel tr").all()
    assert {row.get_attribute("data-column") for row in rows} == set(expected)
    for row in rows:
        shown = row.locator("td").last.inner_text()
        assert float(shown) == pytest.approx(expected[row.get_attribute("data-column")], rel=1e-3)
    assert json.loads(page.locator("#panel-text").inner_text()) == one["text"][index]
    assert f"token {index} of {len(one['text'])}, sample 1, policy, turn 0" in page.locator("#panel").inner_text()


def test_a_click_pins_a_token_and_arrow_keys_move(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data, f"#tokens/{run_data['rollout_steps'][-1]}")
    token = page.locator(".sequence .policy .token").nth(3)
    token.click()
    index = int(token.get_attribute("data-token") or "")
    page.locator(".sequence .policy .token").nth(9).hover()
    assert f"token {index} of" in page.locator("#panel").inner_text()
    assert "pinned" in page.locator("#panel").inner_text()
    page.keyboard.press("ArrowRight")
    assert f"token {index + 1} of" in page.locator("#panel").inner_text()
    page.keyboard.press("ArrowLeft")
    top = page.evaluate("document.querySelector('.token.at').getBoundingClientRect().top")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.querySelector('.token.at').getBoundingClientRect().top") > top
    page.keyboard.press("Escape")
    page.locator(".sequence .policy .token").nth(10).hover()
    assert f"token {index + 7} of" in page.locator("#panel").inner_text()


def test_a_conversation_is_laid_out(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    step = run_data["rollout_steps"][-1]
    one = run_data["rollouts"][str(step)][0]
    page = open_page(run_data, f"#tokens/{step}/{one['group_id']}")
    texts = page.locator("#prompt .token, [data-sample='0'] .token").all_text_contents()
    assert texts == one["text"], "the shared prompt once, then the rest; no token is lost or changed"
    assert page.locator("[data-sample='0'] .block").evaluate_all("all => all.map(b => b.dataset.turn)") == [
        "0",
        "-1",
        "1",
    ]
    tools = page.locator("[data-sample='0'] .tool").all_text_contents()
    assert [tool[:10] for tool in tools] == ["<tool_call", "<tool_resp"]
    assert tools[0].endswith("</tool_call>")
    assert "<|im_end|>" in page.locator("[data-sample='0'] .special").all_text_contents()
    header = page.locator("[data-sample='0'] header").inner_text()
    assert f"reward {one['reward']:.0f} · advantage {0.7 if one['reward'] else -1.1}" in header
    assert f"{sum(turn >= 0 for turn in one['turn'])} tokens" in header


def test_the_coloring_changes_with_the_column(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    step = run_data["rollout_steps"][-1]
    one = run_data["rollouts"][str(step)][0]
    page = open_page(run_data, f"#tokens/{step}/{one['group_id']}")
    index = one["turn"].index(0)

    def color(token: int) -> str:
        place = page.locator(f"[data-sequence='0'][data-token='{token}']")
        return str(place.evaluate("token => getComputedStyle(token).backgroundColor"))

    names = page.locator("#color-by option").all_inner_texts()
    assert names[:3] == ["advantage", "log-ratio, proximal to behavior", "log-ratio, now to proximal"]
    assert names[-1] == "teacher kl", "a column that the page has no words for"
    warm, cold = "rgba(235, 120, 0", "rgba(20, 110, 200"
    assert color(index).startswith(warm if one["reward"] else cold)
    assert color(0) == "rgba(0, 0, 0, 0)"
    page.locator("#color-by").select_option("behavior_log_ratio")
    for token in range(index, index + 10):
        ratio = one["columns"]["proximal_logprobs"][token] - one["columns"]["behavior_logprobs"][token]
        assert color(token).startswith(warm if ratio > 0 else cold) or math.isclose(ratio, 0, abs_tol=1e-3)
    page.locator("#color-by").select_option("correction_weights")
    assert "1 has no color" in page.locator("#scale").inner_text()
    page.locator("#color-by").select_option("versions")
    last = len(one["text"]) - 1
    assert color(index) != color(last)
    assert page.locator("#scale .swatch").count() == 2
    page.locator("#next-group").click()
    page.wait_for_function("group => location.hash.endsWith(group)", arg=f"/{one['group_id'] + 1}")
    assert page.locator("#color-by").input_value() == "versions", "the choice stays"


def test_tokens_come_from_the_folder_beside_the_page(
    open_page: Callable[..., Page], run_data: dict[str, Any], tmp_path: Path
) -> None:
    step = run_data["rollout_steps"][0]
    (tmp_path / "rollouts").mkdir()
    sequences = [{**one, "step": step} for one in run_data["rollouts"][str(run_data["rollout_steps"][-1])]]
    script = tmp_path / "rollouts" / f"step-{step}.js"
    script.write_text(f"arealRollouts({step}, {json.dumps(sequences)})", encoding="utf-8")
    page = open_page(run_data, f"#tokens/{step}/{sequences[0]['group_id']}")
    page.wait_for_selector(".sequence")
    assert page.locator(".sequence").count() == 4
    page.goto(page.url.split("#")[0] + "#tokens/12345/1")
    page.wait_for_function("document.getElementById('group').innerText.includes('12345')")
    assert run_data["missing"] in page.locator("#group").inner_text()


def test_next_and_previous_walk_over_groups_and_steps(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    before, last = run_data["rollout_steps"][-2:]
    groups = [sorted({one["group_id"] for one in run_data["rollouts"][str(step)]}) for step in (before, last)]
    page = open_page(run_data, f"#tokens/{before}/{groups[0][-1]}")
    page.wait_for_selector(".sequence")
    page.locator("#next-group").click()
    page.wait_for_function("route => location.hash === route", arg=f"#tokens/{last}/{groups[1][0]}")
    page.locator("#previous-group").click()
    page.wait_for_function("route => location.hash === route", arg=f"#tokens/{before}/{groups[0][-1]}")
    page.goto(page.url.split("#")[0] + f"#tokens/{last}/{groups[1][-1]}")
    page.wait_for_function("document.getElementById('next-group').disabled")
