"""COMMANDS.md of a trial federation: every command, ready to copy into a terminal."""

from collections.abc import Sequence
from shlex import quote

HEAD = """# Commands of this federation

Put the folder `server` on the server's machine, and each `sites/NAME` on that site's machine and nowhere else: its
`node.key` is private.{authority}
All machines need the same version of `fednca[flower]`, and the `bin` folder of its environment in `PATH`.
First edit every `site.toml`. Then run `fednca flower check .` in each folder: it says what is wrong.

## Start the SuperLink (server's machine, in `server`)

{warning}Open TCP port {port} for the sites' addresses only: whoever reaches it can start a run, which executes code.

```sh
{settings}
{superlink}
```
"""
REGISTER = """
## Register the sites' public keys (server's machine, in `server`, another terminal)

```sh
{settings}
{commands}
```
"""
NODES = """
## Start the SuperNodes (each at its site)

They call the SuperLink, and nobody calls them: a site opens no port to the outside.
"""
NODE = """
### {name}: in `sites/{name}`

```sh
{settings}
{command}
```
"""
RUN = """
## Train (server's machine, in `server`)

```sh
{settings}
{run}
```

The results are in `server/run`. `flwr ls trial` shows the run's status (an exit code of 0 does not mean success),
`flwr log RUN-ID trial` shows its log, and `flwr stop RUN-ID trial` ends it.

## Resume a run that was stopped or killed (server's machine, in `server`)

```sh
{settings}
{resume}
```
"""
SETTINGS = 'export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1'
INSECURE = "**Insecure**: nothing is encrypted, and whoever reaches the port can be a site. Use no real data.\n\n"
AUTHORITY = " Keep `authority/ca.key`, which signs certificates, apart from both."


def commands_page(sites: Sequence[str], host: str, port: int, *, insecure: bool) -> str:
    """Return the page of commands, in Markdown."""
    register = "\n".join(
        f"flwr supernode register {quote(f'nodes/{name}.pub')} trial --name {quote(name)}" for name in sites
    )
    parts = [
        HEAD.format(
            authority="" if insecure else AUTHORITY,
            warning=INSECURE if insecure else "",
            port=port,
            settings=SETTINGS,
            superlink=superlink_command(port, insecure=insecure),
        ),
        "" if insecure else REGISTER.format(settings=SETTINGS, commands=register),
        NODES,
    ]
    for number, name in enumerate(sites):
        command = supernode_command(host, port, 9094 + number, insecure=insecure)
        parts.append(NODE.format(name=name, settings=SETTINGS, command=command))
    parts.append(RUN.format(settings=SETTINGS, run=run_command("false"), resume=run_command("true")))
    return "".join(parts)


def superlink_command(port: int, *, insecure: bool) -> str:
    """Return the command that starts the SuperLink."""
    safety = ["--insecure"]
    if not insecure:
        safety = [
            "--ssl-ca-certfile=certificates/ca.crt",
            "--ssl-certfile=certificates/server.crt",
            "--ssl-keyfile=certificates/server.key",
            "--enable-supernode-auth",
        ]
    others = ["--disable-runtime-dependency-installation", "--database=superlink.db"]
    return " \\\n  ".join(["flower-superlink --host=0.0.0.0", f"--port={port}", *safety, *others])


def supernode_command(host: str, port: int, own_port: int, *, insecure: bool) -> str:
    """Return the command that starts a site's SuperNode; `own_port` serves the SuperNode's own processes only."""
    safety = ["--insecure"] if insecure else ["--root-certificates=ca.crt", "--auth-supernode-private-key=node.key"]
    address = f"[{host}]" if ":" in host else host
    own = [f"--port={own_port}", '--node-config="site=\\"$PWD/site.toml\\""']
    return " \\\n  ".join([f"flower-supernode --superlink={address}:{port}", *safety, *own])


def run_command(resume: str) -> str:
    """Return the command that starts the run, or resumes it."""
    return f'flwr run app trial --run-config "server=\\"$PWD/server.toml\\" resume={resume}" --stream'
