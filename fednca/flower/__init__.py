"""The same methods on real federations: a Flower app, and the only place that imports flwr."""

from typing import TYPE_CHECKING

from fednca.base.lazy import lazy

if TYPE_CHECKING:
    from fednca.flower.app import write_app
    from fednca.flower.config import PrivacyConfig, ServerConfig, SiteConfig, load_server, load_site
    from fednca.flower.engine import FlowerEngine
    from fednca.flower.privacy import epsilon_after
    from fednca.flower.ready import find_problems
    from fednca.flower.server import serve
    from fednca.flower.trial import Trial, write_trial
    from fednca.flower.uploads import Sent, what_leaves
else:
    __getattr__, __dir__ = lazy(__name__, "config", "privacy", "uploads", "app", "ready", "trial", "server", "engine")

__all__ = [
    "FlowerEngine", "PrivacyConfig", "Sent", "ServerConfig", "SiteConfig", "Trial", "epsilon_after", "find_problems",
    "load_server", "load_site", "serve", "what_leaves", "write_app", "write_trial",
]  # fmt: skip
