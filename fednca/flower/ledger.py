"""How often each site's update was released under differential privacy, and the epsilon that this has spent."""

import json
from pathlib import Path
from typing import Any

from fednca.base.files import write_atomic
from fednca.flower.config import PrivacyConfig
from fednca.flower.privacy import epsilon_after
from fednca.runs.folder import read_json


class Ledger:
    """Counts whom a round asks, before it asks them: where sites add the noise, a lost round has cost privacy, too."""

    def __init__(self, path: Path, privacy: PrivacyConfig) -> None:
        """Go on with the counts in `path`, if there are any."""
        self.path, self.privacy = path, privacy
        self.asked: dict[str, int] = read_json(path) if path.exists() else {}

    def epsilon(self, more: int = 0) -> float:
        """Return the largest epsilon of a site, after `more` further rounds with all of them."""
        return epsilon_after(self.privacy, max(self.asked.values(), default=0) + more)

    def is_spent(self) -> bool:
        """Return whether another round would spend more than `max_epsilon`."""
        private, limit = self.privacy.mode != "none", self.privacy.max_epsilon
        return private and limit is not None and self.epsilon(more=1) > limit

    def ask(self, sites: list[str]) -> None:
        """Count a round for these sites, who are about to be asked."""
        if self.privacy.mode != "none":
            self.asked |= {site: self.asked.get(site, 0) + 1 for site in sites}
            write_atomic(self.path, json.dumps(self.asked).encode())

    def record(self) -> dict[str, Any]:
        """Return what history and results say about privacy; nothing in mode `none`."""
        if self.privacy.mode == "none":
            return {}
        spent = {"mode": self.privacy.mode, "epsilon": self.epsilon(), "delta": self.privacy.delta}
        return {"privacy": spent}
