"""A headless Chromium without network, and the hand and eyes to use a report page with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import system_tools

system_tools.package("selenium")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

# A page of 1024 ranks takes two seconds to draw; a machine under load gets much more.
PATIENCE_S = 60


def programs() -> list[str]:
    """Paths of Chromium and its driver."""
    return system_tools.paths(
        "a headless Chromium and its driver",
        "chromium chromium-driver",
        ("chromium", "chromium-browser"),
        ("chromedriver",),
    )


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser that is gone afterwards, with its processes."""
    chromium, driver_path = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Containers run as root, where Chromium refuses its sandbox.
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver_path)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """One page at a time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, page: Path, *, dark: bool = False) -> None:
        """Load a page from disk, wait until its pictures are drawn."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(page.as_uri())
        self.wait_until_drawn()

    def wait_until_drawn(self) -> None:
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(
            lambda driver: driver.execute_script("return document.body.dataset.ready") or False
        )

    def text(self, selector: str) -> str:
        """Visible text of the first element that `selector` finds."""
        return str(self.driver.find_element("css selector", selector).text)

    def texts(self, selector: str) -> list[str]:
        """Visible text of all elements that are shown."""
        found = self.driver.find_elements("css selector", selector)
        return [element.text for element in found if element.is_displayed()]

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()
        self.wait_until_drawn()

    def choose(self, name: str, value: str) -> None:
        """Pick a radio button."""
        self.click(f'input[name="{name}"][value="{value}"]')

    def choose_window(self, index: int) -> None:
        self.click(f'#window option[value="{index}"]')

    def hover_cell(self, row: int, column: int) -> list[str]:
        """Point at a cell of the heatmap; the lines that are shown for it."""
        at = self.dataset("heat")
        x = at["left"] + (column + 0.5) * at["cell"]
        y = at["top"] + (row + 0.5) * at["cell"]
        element = self.driver.find_element("id", "heat")
        self.driver.execute_script(
            "arguments[0].scrollIntoView({block: 'start'});"
            "const box = arguments[0].parentElement;"
            "box.scrollLeft = arguments[1] - 200; box.scrollTop = arguments[2] - 200;",
            element,
            x,
            y,
        )
        box = self.driver.execute_script(
            "const b = arguments[0].getBoundingClientRect(); return [b.left, b.top];", element
        )
        chain = ActionChains(self.driver, duration=0)
        at_pixel = (math.ceil(corner + place - 0.5) for corner, place in zip(box, (x, y)))
        chain.w3c_actions.pointer_action.move_to_location(*at_pixel)
        chain.perform()
        return self.tip()

    def press(self, *keys: str) -> list[str]:
        """Focus the heatmap and press keys; the lines shown."""
        element = self.driver.find_element("id", "heat")
        element.send_keys("")
        for key in keys:
            element.send_keys(key)
        return self.tip()

    def tip(self) -> list[str]:
        """The lines shown for what is pointed at."""
        return [line for line in self.text("#tip").splitlines() if line]

    def dataset(self, element: str) -> dict[str, float]:
        """Where the heatmap has its cells, in pixels."""
        found = self.driver.execute_script(
            "return {...document.getElementById(arguments[0]).dataset}", element
        )
        return {key: float(value) for key, value in found.items()}

    def pixel(self, row: int, column: int) -> list[int]:
        """[red, green, blue, alpha] of a cell."""
        return list(
            self.driver.execute_script(
                # From a copy: Chromium warns when the page's own canvas is read again and again.
                "const copy = new OffscreenCanvas(1, 1).getContext('2d');"
                "copy.drawImage(document.getElementById('cells'), -arguments[0], -arguments[1]);"
                "return [...copy.getImageData(0, 0, 1, 1).data];",
                column,
                row,
            )
        )

    def marks(self) -> list[list[float]]:
        """[x, y, width, height] of what is marked in the heatmap, in pixels."""
        found = self.driver.find_elements("css selector", "#over .mark")
        sides = ("x", "y", "width", "height")
        return [[float(mark.get_attribute(side)) for side in sides] for mark in found]

    def written_over(self) -> list[str]:
        """The texts in and around the cells."""
        return [text.text for text in self.driver.find_elements("css selector", "#over text")]

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements("css selector", selector))

    def complaints(self) -> list[str]:
        """What stands in the console: errors, warnings, what the page's policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Addresses the page asked for since it was loaded."""
        messages = (
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        )
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
