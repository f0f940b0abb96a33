"""The page of `areal view`: overview, rollouts, timeline, and what all pages have in common."""

from __future__ import annotations

import copy
import re
import time
from typing import TYPE_CHECKING, Any

import page_data
import pytest

from areal_view.page import page as page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
PAGES = ("overview", "rollouts", "tokens", "timeline", "config")


def scale(page: Page, chart: str) -> list[float]:
    page.wait_for_selector(f"[data-chart='{chart}'] .uplot")  # charts are drawn when they come into sight
    find = "[...document.querySelectorAll('.plot')].find(place => place.dataset.chart === title)"
    return page.evaluate(f"title => {{ const {{ min, max }} = {find}.plot.scales.x; return [min, max]; }}", chart)


def test_overview_shows_the_run(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    assert page.locator("#name").inner_text() == "gsm8k-1"
    assert page.locator("#progress").inner_text().startswith("step 60 of 60 · made ")
    assert page.locator("#facts dd").first.inner_text() == "Qwen/Qwen3-0.6B"
    assert page.locator("#notes li").inner_text() == run_data["notes"][0]
    assert page.locator("#diagnostics > p").inner_text() == "Step 31: The entropy has halved within 20 steps."
    assert page.locator("#charts .card").count() == len(run_data["charts"])
    assert "no values yet of train/nothing" in page.locator("#charts").inner_text()
    assert page.locator("#charts .uplot").count() == 4


def test_the_legend_has_the_values_under_the_cursor(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    page.locator("[data-chart='Entropy'] .u-over").hover(position={"x": 1, "y": 40})
    shown = page.locator("[data-chart='Entropy'] .u-series:not(.raw) .u-value").all_inner_texts()
    assert shown[0] == "1"
    assert float(shown[1]) == pytest.approx(run_data["metrics"]["columns"]["train/entropy"][0], rel=1e-4)
    other = page.locator("[data-chart='Reward'] .u-series:not(.raw) .u-value").all_inner_texts()
    assert other[0] == "1", "cursors are synchronized"


def test_other_runs_have_curves_of_their_own_in_each_chart(
    open_page: Callable[..., Page], run_data: dict[str, Any]
) -> None:
    run_data = copy.deepcopy(run_data)
    columns = run_data["metrics"]["columns"]
    columns |= {f"{key} · second": values for key, values in [*columns.items()]}
    run_data["others"] = ["second"]
    for chart in run_data["charts"]:
        if not chart.get("stacked"):
            chart["keys"] = [*chart["keys"], *(f"{key} · second" for key in chart["keys"] if key in columns)]
    page = open_page(run_data)
    labels = page.locator("[data-chart='Entropy'] .u-series:not(.raw) .u-label").all_inner_texts()
    assert labels[-1] == "train/entropy · second"
    assert page.locator("#x-axis").is_hidden(), "the steps of two runs have two times"
    page.locator("#metric-filter").fill("agents/turns")
    page.wait_for_selector("[data-chart='agents/turns'] .uplot")
    labels = page.locator("[data-chart='agents/turns'] .u-series:not(.raw) .u-label").all_inner_texts()
    assert labels[1:] == ["value", "agents/turns · second"]
    assert page.locator("#metric-count").inner_text().startswith("1 of")


def test_a_chart_zooms_and_the_others_follow(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    assert scale(page, "Reward") == [1, 60]
    box = page.locator("[data-chart='Reward'] .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    zoomed = scale(page, "Reward")
    assert zoomed == pytest.approx([1 + 59 / 4, 1 + 59 / 2], abs=0.5)
    assert scale(page, "Entropy") == pytest.approx(zoomed, abs=0.5)
    page.locator("#smoothing").fill("0.9")
    assert scale(page, "Reward") == zoomed, "smoothing keeps the zoom"
    page.locator("#metric-filter").scroll_into_view_if_needed()
    page.wait_for_selector("[data-chart='agents/turns'] .uplot")
    assert scale(page, "agents/turns") == pytest.approx(zoomed, abs=0.5), "a chart that comes into sight later"
    page.locator("[data-chart='Reward'] .u-over").dblclick()
    assert scale(page, "Reward") == [1, 60]


def test_smoothing_is_an_exponential_moving_average(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    page.locator("#smoothing").fill("0.8")
    assert "exponential moving average" in page.locator("#smoothing-text").inner_text()
    shown = page.evaluate("document.querySelector('[data-chart=\"Gradient norm\"]').plot.data[2]")
    mean = weight = 0.0
    for value, smooth in zip(run_data["metrics"]["columns"]["train/gradient_norm"], shown, strict=True):
        if value is None:
            assert smooth is None
            continue
        mean, weight = 0.8 * mean + 0.2 * value, 0.8 * weight + 0.2
        assert smooth == pytest.approx(mean / weight)


def test_time_begins_with_the_first_event_or_metric(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    page.locator("#x-axis").select_option("time")
    page.wait_for_selector("[data-chart='Reward'] .uplot")
    first = run_data["timeline"]["tracks"][0]["spans"][0][0]
    metrics = [value - first for value in run_data["metrics"]["time"]]
    assert scale(page, "Reward") == pytest.approx([metrics[0], metrics[-1]])


def test_any_metric_is_found_by_its_key(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data)
    titles = page.locator("#small-charts h3").all_inner_texts()
    assert "train/learning_rate" in titles
    assert "train/entropy" not in titles, "it has a chart of its own"
    assert "time/step_s" not in titles
    page.locator("#metric-filter").fill("TIME/ step")
    assert page.locator("#small-charts h3").all_inner_texts() == ["time/step_s"]
    assert page.locator("#metric-count").inner_text() == f"1 of {len(run_data['metrics']['columns'])} metrics"


def test_rollouts_are_filtered_and_sorted(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data, "#rollouts")
    table = run_data["sequences"]
    count = page.locator("#row-count")

    def rows(*conditions: Callable[[int], bool]) -> str:
        kept = [i for i in range(len(table["step"])) if all(condition(i) for condition in conditions)]
        return f"{len(kept)} of {len(table['step'])} logged sequences"

    assert count.inner_text() == rows()
    page.locator("#reward-from").fill("1")
    assert count.inner_text() == rows(lambda i: table["reward"][i] >= 1)
    third = run_data["rollout_steps"][2]
    page.locator("#step-to").fill(str(third))
    assert count.inner_text() == rows(lambda i: table["reward"][i] >= 1, lambda i: table["step"][i] <= third)
    page.locator("#reward-from").fill("")
    page.locator("#step-to").fill("")
    page.locator("#text-has").fill("what is 301 +")
    assert count.inner_text() == rows(lambda i: table["group_id"][i] == 301)
    page.locator("#text-has").fill("")
    page.locator("#finish_reason-is").select_option("length")
    assert count.inner_text() == rows(lambda i: table["finish_reason"][i] == "length")
    page.locator("[data-sort=reward] button").click()
    shown = page.locator("td[data-field=reward]").all_inner_texts()
    assert [float(reward) for reward in shown] == sorted(float(reward) for reward in shown)
    page.locator("[data-sort=reward] button").click()
    assert page.locator("td[data-field=reward]").first.inner_text() == "1"
    assert page.locator("[data-sort=reward]").get_attribute("aria-sort") == "descending"


def test_a_row_opens_its_group_and_back_returns(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data, "#rollouts")
    step, group = run_data["rollout_steps"][-1], run_data["sequences"]["group_id"][-1]
    page.locator("tr.row", has_text=str(group)).first.locator("td[data-field=answer]").click()
    page.wait_for_selector(".sequence")
    assert page.url.endswith(f"#tokens/{step}/{group}")
    assert page.locator(".sequence").count() == 4
    page.go_back()
    assert page.locator("#table").is_visible()


def test_samples_are_in_a_fold(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data, "#rollouts")
    page.locator("#samples > summary").click()
    assert page.locator("#samples details > summary").first.inner_text() == "weight version 0 · rewards 1, 0"
    page.locator("#samples details > summary").first.click()
    assert page.locator("#samples pre").first.inner_text() == "2 + 2 = 4"


def test_the_timeline_tells_spans_and_versions(open_page: Callable[..., Page], run_data: dict[str, Any]) -> None:
    page = open_page(run_data, "#timeline")
    whole = page.evaluate("timelineCharts.map(chart => [chart.scales.x.min, chart.scales.x.max])")
    begin, end, name = run_data["timeline"]["tracks"][0]["spans"][0]
    assert whole[0] == whole[1]
    box = page.locator("#tracks .u-over").bounding_box()
    assert box is not None
    middle = (begin + end) / 2 - run_data["timeline"]["tracks"][0]["spans"][0][0]
    page.mouse.move(box["x"] + middle / whole[0][1] * box["width"], box["y"] + 8)
    tip = page.locator("#span-tip").inner_text()
    assert name in tip
    assert "trainer-0 · phases" in tip
    seconds = re.search(r"([\d.]+) s from 0:00:00", tip)
    assert seconds is not None
    assert float(seconds[1]) == pytest.approx(end - begin, rel=1e-3)
    page.mouse.wheel(0, -400)
    page.wait_for_function("timelineCharts.every(chart => chart.scales.x.max < 0.9 * WHOLE[1])")
    page.locator("#tracks .u-over").dblclick()
    page.wait_for_function("timelineCharts.every(chart => chart.scales.x.max === WHOLE[1])")
    page.locator("#in-flight .u-over").hover(position={"x": 500, "y": 60})
    assert "version" in page.locator("#in-flight-legend").inner_text()
    assert "areal view RUN_DIR --trace" in page.locator("#timeline").inner_text()


def test_text_of_the_policy_is_text(open_page: Callable[..., Page]) -> None:
    data = page_data.run_data(logged_steps=2, inline=1)
    step = data["rollout_steps"][-1]
    evil = page_data.EVIL
    for one in data["rollouts"][str(step)]:
        one["text"][one["turn"].index(0)] = evil
        one["agent"] = evil
    for column in ("prompt", "answer", "agent", "finish_reason"):
        data["sequences"][column] = [evil] * len(data["sequences"]["step"])
    data["samples"][0]["episodes"][0]["text"] = evil
    data["diagnostics"].append({"step": 1, "text": evil})
    data["notes"].append(evil)
    data["facts"].append([evil, evil])
    data["name"] = data["config"] = evil
    data["metrics"]["columns"][f"train/{evil}"] = data["metrics"]["columns"]["train/entropy"]
    data["timeline"]["tracks"][0]["process"] = evil
    for span in data["timeline"]["tracks"][0]["spans"]:
        span[2] = evil
    group = data["rollouts"][str(step)][0]["group_id"]
    page = open_page(data)
    for route in ("overview", "rollouts", f"tokens/{step}/{group}", "timeline", "config"):
        page.evaluate("route => { location.hash = route; }", route)
        page.wait_for_timeout(150)
        assert evil in (page.locator(f"#{route.split('/')[0]}").text_content() or "")
    page.locator("#samples > summary").evaluate("summary => summary.click()")
    page.wait_for_timeout(50)
    assert page.evaluate("window.evil") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("route", PAGES)
def test_empty_data_gives_a_sentence(open_page: Callable[..., Page], route: str) -> None:
    page = open_page(page_data.empty_data(), f"#{route}")
    sentences = {
        "overview": "no metrics yet",
        "rollouts": "no rollouts were logged: training.logged_groups",
        "tokens": "no rollouts were logged: training.logged_groups",
        "timeline": "no timeline yet",
        "config": "no config was saved",
    }
    assert sentences[route] in page.locator(f"#{route}").inner_text()


def test_one_step_and_columns_that_an_algorithm_lacks(open_page: Callable[..., Page]) -> None:
    data = page_data.run_data(points=1, logged_steps=1, inline=1)
    data["metrics"]["columns"]["train/entropy"] = [None]
    for sequences in data["rollouts"].values():
        for one in sequences:
            one["columns"] = {"loss_mask": one["columns"]["loss_mask"]}
    page = open_page(data)
    assert page.locator("#charts .uplot").count() == 3
    page.evaluate("location.hash = '#tokens'")
    page.wait_for_selector(".sequence")
    page.locator(".policy .token").first.hover()
    assert page.locator("#panel tr").count() == 1
    page.evaluate("location.hash = '#timeline'")
    page.wait_for_selector("#tracks .uplot")


@pytest.mark.parametrize("route", PAGES)
def test_no_page_has_an_error_in_the_dark_either(
    open_page: Callable[..., Page], run_data: dict[str, Any], route: str
) -> None:
    page = open_page(run_data, f"#{route}")
    page.wait_for_timeout(100)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
    assert page.locator("[aria-current=page]").get_attribute("data-page") == route


@pytest.mark.nightly
def test_a_large_run_opens(open_page: Callable[..., Page]) -> None:
    data = page_data.large_data()
    assert len(data["metrics"]["columns"]) >= 120
    assert len(data["sequences"]["step"]) == 20_000
    size = len(page_of(data)) / 1e6
    spent = {}
    for route, there in (("overview", "#charts .uplot"), ("rollouts", "tr.row"), ("timeline", "#tracks .uplot")):
        page = open_page(data, f"?{route}#{route}")  # the query makes it a new document
        page.wait_for_selector(there)
        loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        spent[route] = f"{loaded:.0f} ms to load, at most {page.evaluate('performance.now()'):.0f} ms to be drawn"
    page.evaluate("location.hash = '#rollouts'")
    page.wait_for_selector("tr.row")
    begin = time.perf_counter()
    page.locator("#text-has").fill("what is 1003 +")
    page.wait_for_function("document.getElementById('row-count').innerText !== '20000 of 20000 logged sequences'")
    spent["filter"] = f"{1000 * (time.perf_counter() - begin):.0f} ms"
    print(f"{size:.1f} MB: {spent}")
