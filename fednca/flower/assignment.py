"""What a message tells a site beside tensors: what to do, in which run and round."""

import json

from flwr.app import ConfigRecord, RecordDict

from fednca.base.errors import FedncaError
from fednca.config import Config, Options, validate
from fednca.flower.config import PrivacyConfig
from fednca.flower.state import RUN

ASSIGNMENT = "assignment"  # name of the record in a message


class Assignment(Options):
    """A site's part in one exchange; a site's process knows this and its own site.toml, and nothing else."""

    config: Config
    run: str  # 16 hexadecimal digits
    classes: tuple[str, ...] = ()
    round: int = 0
    client: int = 0  # the rank of the site's name among all names
    accepted: int = 0  # the last round in which the server used an update of this site
    privacy: PrivacyConfig = PrivacyConfig()
    folder: str = ""  # where simulated clients keep their states

    def to_record(self) -> ConfigRecord:
        """Write the assignment into a message."""
        return ConfigRecord({"json": self.model_dump_json()})

    @classmethod
    def from_message(cls, content: RecordDict) -> "Assignment":
        """Read the assignment of a message."""
        told = validate(cls, json.loads(str(content.config_records[ASSIGNMENT]["json"])))
        if not RUN.fullmatch(told.run):
            raise FedncaError(f"run '{told.run}' is not 16 hexadecimal digits; install the same fednca everywhere")
        return told
