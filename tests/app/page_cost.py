"""Does the page slow the engine? `python -m tests.app.page_cost`: the same request run directly and through the page in a
real browser, in turns, on the embedded target; sums of phase times must agree within 5 %."""

import argparse
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from app.models import Models
from app.page import build
from app.theme import page_head, theme
from decoding import Generation, Settings
from decoding.metrics import measure
from decoding.records import AUTOREGRESSIVE
from tests.app.conftest import FLAGS

PROMPT = "Explain to a ten-year-old why the sea has tides. Use four short sentences."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--head", default=None, help="folder or name of a head (default: the first shipped one)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    models = Models(options.target, extra_heads=(options.head,) if options.head else ())
    target = models.target(options.target)
    name = options.head or models.offers()[1].source
    head = models.head(name, target)
    for source, loaded in ((AUTOREGRESSIVE, None), (name, head)):
        models.warm_up(source, target, loaded)
    demo = build(models, Path(tempfile.mkdtemp()))
    _, url, _ = demo.queue().launch(prevent_thread_lock=True, quiet=True, ssr_mode=False, theme=theme(), head=page_head())
    direct, paged = {"plain": [], "head": []}, {"plain": [], "head": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=FLAGS)
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#ds-prompt textarea")
        page.fill("#ds-prompt textarea", PROMPT)
        for label in page.locator("#ds-methods label").all():
            wanted = label.inner_text().strip() in (
                "Plain decoding",
                models.offers()[-1].label if options.head else models.offers()[1].label,
            )
            label.locator("input").set_checked(wanted)
        page.click("#ds-settings button")
        page.get_by_label("number input for New tokens").fill(str(options.tokens))
        page.keyboard.press("Tab")
        for turn in range(options.rounds):
            for key, loaded in (("plain", None), ("head", head)):
                generation = Generation(target, loaded, PROMPT, Settings(max_new_tokens=options.tokens), drift=True)  # as the page does
                for _ in generation:
                    pass
                direct[key].append(sum(measure(generation.run).phase_ms.values()))
            before = page.evaluate("draftscope.state.session")
            page.click("#ds-run")
            page.wait_for_function(
                "before => draftscope.state.session !== before && !draftscope.state.info.running", arg=before, timeout=300_000
            )
            sums = page.evaluate("draftscope.state.lanes.map(l => l.steps.reduce((sum, s) => sum + draftscope.total(s), 0))")
            paged["plain"].append(sums[0])
            paged["head"].append(sums[1])
            print(
                f"round {turn + 1}: " + ", ".join(f"{key} direct {direct[key][-1]:.0f} ms, page {paged[key][-1]:.0f} ms" for key in direct),
                flush=True,
            )
        browser.close()
    demo.close()
    worst = 0.0
    for key in direct:
        mine, theirs = statistics.median(direct[key]), statistics.median(paged[key])
        best = min(paged[key]) / min(direct[key]) - 1
        worst = max(worst, min(abs(theirs / mine - 1), abs(best)))
        print(
            f"{key}: median {mine:.0f} ms directly, {theirs:.0f} ms through the page ({theirs / mine - 1:+.1%}); best of each {best:+.1%}"
        )
    return int(worst > 0.05)


if __name__ == "__main__":
    raise SystemExit(main())
