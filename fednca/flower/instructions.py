"""COMMANDS.md of a trial federation: every command, ready to copy into a terminal."""

from collections.abc import Sequence
from shlex import quote

from fednca.flower.app import template

SETTINGS = 'export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1'
INSECURE = "**Insecure**: nothing is encrypted, and whoever reaches the port can be a site. Use no real data.\n\n"
AUTHORITY = " Keep `authority/ca.key`, which signs certificates, apart from both."
SERVER_SAFETY = r"""--ssl-ca-certfile=certificates/ca.crt \
  --ssl-certfile=certificates/server.crt \
  --ssl-keyfile=certificates/server.key \
  --enable-supernode-auth"""
SITE_SAFETY = r"""--root-certificates=ca.crt \
  --auth-supernode-private-key=node.key"""


def commands_page(sites: Sequence[str], address: str, port: int, *, insecure: bool) -> str:
    """Return the page of commands, in Markdown."""
    head, register, nodes, node, run = template("COMMANDS.md").split("<!-- cut -->\n")
    supernodes = [
        node.format(
            name=name,
            settings=SETTINGS,
            address=address,
            port=port,
            site_safety="--insecure" if insecure else SITE_SAFETY,
            own_port=9094 + number,  # it serves the SuperNode's own processes only
        )
        for number, name in enumerate(sites)
    ]
    return "".join([head, "" if insecure else register, nodes, "{supernodes}", run]).format(
        authority="" if insecure else AUTHORITY,
        warning=INSECURE if insecure else "",
        port=port,
        settings=SETTINGS,
        server_safety="--insecure" if insecure else SERVER_SAFETY,
        registrations="\n".join(
            f"flwr supernode register {quote(f'nodes/{name}.pub')} trial --name {quote(name)}" for name in sites
        ),
        supernodes="".join(supernodes),
    )
