"""How often sites' updates were released under privacy, and the epsilon that has been spent."""

import json
from pathlib import Path
from typing import Any

from fednca.base.files import write_atomic
from fednca.flower.config import PrivacyConfig
from fednca.flower.privacy import epsilon_after
from fednca.runs.folder import read_json


class Ledger:
    """Counts, before each round, whom it asks: also a round that is lost has cost privacy where sites add the noise."""

    def __init__(self, path: Path, privacy: PrivacyConfig) -> None:
        """Go on with the counts in `path`, where there are any."""
        self.path, self.privacy = path, privacy
        self.asked: dict[str, int] = read_json(path) if path.exists() else {}

    def epsilon(self, more: int = 0) -> float:
        """Return the largest epsilon of a site, after `more` further rounds with all of them."""
        return epsilon_after(self.privacy, max(self.asked.values(), default=0) + more)

    def is_spent(self) -> bool:
        """Tell whether another round would spend more than allowed."""
        private, limit = self.privacy.mode != "none", self.privacy.max_epsilon
        return private and limit is not None and self.epsilon(more=1) > limit

    def ask(self, sites: list[str]) -> None:
        """Count a round that these sites are asked to take part in."""
        if self.privacy.mode != "none":
            self.asked |= {site: self.asked.get(site, 0) + 1 for site in sites}
            write_atomic(self.path, json.dumps(self.asked).encode())

    def record(self) -> dict[str, Any]:
        """Return what history and results say of privacy; nothing without it."""
        if self.privacy.mode == "none":
            return {}
        spent = {"mode": self.privacy.mode, "epsilon": self.epsilon(), "delta": self.privacy.delta}
        return {"privacy": spent}
