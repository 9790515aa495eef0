"""The page at ``/`` in a real browser: it shows what was done, fits a screen, and says so when the daemon is away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from kvoffd_client import AdminClient, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.admin import SetQuota
from kvoffd_proto.messages import GroupSpec, Outcome, PromptReport
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.observe.chromium import PROGRAM, Chromium, inner_text

EVIL = '<img src=x onerror="document.title=`hit`">'


@pytest.fixture
def browser() -> Iterator[Chromium]:
    require("chromium", PROGRAM, "chromium is not installed")
    with Chromium() as made:
        yield made


def rows(browser: Chromium, table: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    line = "[...row.cells].map(cell => cell.innerText)"
    found = browser.value(f"[...document.querySelectorAll('#{table} tr')].map(row => {line})")
    return [list(map(str, row)) for row in found][1:]


def test_the_page_shows_what_was_done_and_is_honest_when_the_daemon_is_away(browser: Chromium) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    spec = NamespaceSpec(b"\xab" * 32, EVIL, 1, 32, (GroupSpec("full_attention", 16),))
    with (
        DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon,
        FakeEngine(daemon.directory, spec) as engine,
        FakeEngine(daemon.directory, "another") as limited,
        AdminClient(daemon.directory) as admin,
    ):
        admin.ask(SetQuota, limited.namespace.fingerprint, 1 << 30)
        engine.scheduler.report(100.0, 0, 0)
        block_keys = [bytes([number]) * 32 for number in range(8)]
        assert engine.store(block_keys[:4], range(4)).ok
        assert engine.lookup(block_keys) == 4
        assert engine.load(block_keys[:3], range(3)).ok
        given = {"loaded_tokens": 48, "own_tokens": 20, "missing_key": block_keys[4], "missing_number": 5}
        engine.scheduler.report_prompt(PromptReport(EVIL, 1.0, 128, 8, 4, 0, 0, Outcome.LOADED, **given))
        wait_until(lambda: admin.stats().since_start.prompt_tokens)
        browser.open(url)
        wait_until(lambda: browser.text("level") == "ok")
        assert browser.text("node") == socket.gethostname()
        assert browser.text("verdict") == "Too early to say whether it pays off: 1 lookup so far, 100 are needed."
        outcomes = {name: whole.split() for name, _, _, whole in rows(browser, "outcomes")}
        assert outcomes["keys asked for"] == ["8"]
        assert outcomes["tokens of prompts"] == ["128"]
        assert outcomes["computed"] == ["60", "(46.9", "%)"]
        assert outcomes["engines' own cache"] == ["20", "(15.6", "%)"]
        assert outcomes["pool"] == ["48", "(37.5", "%)"]
        assert not {"disk", "store", "peer", "other connectors"} & set(outcomes)
        assert outcomes["missed: never stored"] == ["4", "(50.0", "%)"]
        assert browser.text("totals").startswith("48 tokens loaded since the start, 480.0 ms of prefill saved; 37.5 %")
        assert browser.value("uncounted({loaded_keys: 5, loaded_tokens: 0})")
        assert browser.value("saved({loaded_tokens: 5, saved_seconds: 0})") == "unknown seconds"
        # Names are text, whatever they are.
        assert [row[0] for row in rows(browser, "namespaces")] == [EVIL, "another"]
        assert rows(browser, "namespaces")[1][3] == "0 B of 1.0 GiB", "a quota is shown where there is one"
        assert browser.value("document.images.length") == 0
        assert browser.value("document.title") == f"kvoffd {socket.gethostname()}"
        # By the keyboard: sorting keeps the focus where it was.
        browser.value("document.querySelector('[data-column=model]').focus()")
        browser.press("Enter")
        browser.press("Enter")
        assert [row[0] for row in rows(browser, "namespaces")] == [EVIL, "another"]
        browser.press("Enter")
        assert [row[0] for row in rows(browser, "namespaces")] == ["another", EVIL]
        assert browser.value("document.activeElement.dataset.column") == "model"
        # Engines and the last prompts, with the reason; its whole sentence unfolds, and stays so.
        named = [row[0] for row in rows(browser, "engines")]
        assert len(named) == 2
        (latest,) = rows(browser, "prompts")
        assert (latest[1:3], latest[4:6]) == ([EVIL, "128"], ["60", "20"])
        assert latest[6] == "48 pool"
        assert latest[7].startswith("never stored in this namespace")
        browser.value("document.querySelector('#prompts summary').click()")
        wait_until(lambda: "The first key that neither had, number 5" in rows(browser, "prompts")[0][7])
        shown = browser.text("at")
        wait_until(lambda: browser.text("at") != shown)
        assert "number 5" in rows(browser, "prompts")[0][7], "after the next numbers too"
        # A finding's command is there to copy.
        finding = {"level": "info", "check": "c", "text": EVIL, "fix": "curl x; then y", "command": "curl x"}
        given_one = f"findings({{...latest, findings: [{json.dumps(finding)}]}})"
        clicked = "document.querySelector('#findings button').click()"
        # In one call: between two the page may have got the next numbers, which have no finding.
        seen = browser.value(f"{given_one}, {clicked}, [String(getSelection()), {inner_text('findings')}]")
        assert seen[0].strip() == "curl x"
        assert seen[1].startswith(f"info c {EVIL}")
        # Another tab begins with the same graphs: they are the daemon's.
        graph = "document.querySelector('#tokens-graph path:last-of-type').getAttribute('d').length"
        wait_until(lambda: browser.value("latest.steps.length") > 1)
        wait_until(lambda: browser.value(graph) > len("M0 0"))
        browser.open(url)
        wait_until(lambda: browser.value("typeof latest !== 'undefined' && latest !== null"))
        assert browser.value(graph) > len("M0 0")
        assert browser.text("tokens-more").startswith("in the last minute, 37.5 % of them loaded")
        assert "1, each within " in browser.text("lookups-more"), "one lookup has no percentile"
        # It fits in width, on a screen and on a telephone, and nothing of a third of the screen is blank.
        for width, high in ((1200, 900), (390, 844)):
            size = {"width": width, "height": high, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.ask("Emulation.setDeviceMetricsOverride", **size)
            wait_until(lambda wide=width: browser.value("document.documentElement.scrollWidth") <= wide)
            assert browser.value("document.querySelector('main').getBoundingClientRect().bottom") >= 0.9 * high
        browser.dark(True)
        colours = [browser.value("getComputedStyle(document.querySelector('.card')).backgroundColor")]
        browser.dark(False)
        colours.append(browser.value("getComputedStyle(document.querySelector('.card')).backgroundColor"))
        assert colours[0] != colours[1]
        sentence = "Not paying off: of it."
        changed = f"{{...latest, stats: {{...latest.stats, paying_off: false, verdict: {sentence!r}}}}}"
        assert browser.value(f"show({changed}), {inner_text('level')}") == "ok, not paying off"
        daemon.stop()
        wait_until(lambda: browser.text("level") == "away")
        assert browser.text("away").startswith("The daemon does not answer (")
        assert "The numbers below are of " in browser.text("away")
        assert outcomes["keys asked for"], "they stay"
        daemon.start()
        wait_until(lambda: browser.text("level") == "ok")
        assert browser.value("document.getElementById('away').hidden")
