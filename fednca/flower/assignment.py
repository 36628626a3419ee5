"""What a message tells a site beside tensors: what to do, in which run and round."""

import json
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, RecordDict

from fednca.base.errors import FedncaError
from fednca.config import Config, build_config, validate
from fednca.flower.config import PrivacyConfig

ASSIGNMENT = "assignment"  # name of the record in a message


@dataclass(frozen=True)
class Assignment:
    """A site's part in one exchange; a site's process knows this and its own site.toml, and nothing else."""

    config: Config
    run: str  # 16 hexadecimal digits
    classes: tuple[str, ...] = ()
    round: int = 0
    client: int = 0  # the rank of the site's name among all names
    accepted: int = 0  # the last round in which the server used an update of this site
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    folder: str = ""  # where simulated clients keep their states

    def to_record(self) -> ConfigRecord:
        """Write the assignment into a message."""
        return ConfigRecord(
            {
                "config": self.config.model_dump_json(),
                "run": self.run,
                "classes": list(self.classes),
                "round": self.round,
                "client": self.client,
                "accepted": self.accepted,
                "privacy": self.privacy.model_dump_json(),
                "folder": self.folder,
            }
        )

    @classmethod
    def from_message(cls, content: RecordDict) -> "Assignment":
        """Read the assignment of a message."""
        record = content.config_records[ASSIGNMENT]
        run = str(record["run"])
        if len(run) != 16 or not set(run) <= set("0123456789abcdef"):
            raise FedncaError(f"run '{run}' is not 16 hexadecimal digits; install the same fednca everywhere")
        return cls(
            config=build_config(json.loads(str(record["config"]))),
            run=run,
            classes=tuple(map(str, record["classes"])),  # type: ignore[arg-type]
            round=int(record["round"]),  # type: ignore[arg-type]
            client=int(record["client"]),  # type: ignore[arg-type]
            accepted=int(record["accepted"]),  # type: ignore[arg-type]
            privacy=validate(PrivacyConfig, json.loads(str(record["privacy"]))),
            folder=str(record["folder"]),
        )
