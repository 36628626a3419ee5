"""The commands of a trial federation, to copy into a terminal."""

from collections.abc import Sequence
from shlex import quote

HEAD = """# Commands of this federation

The folder `server` belongs on the server's machine, `sites/NAME` on that site's and nowhere else: its `node.key` is
private.{authority} All machines need the same version of `fednca[flower]`, and its `bin` in `PATH`.
Change every `site.toml` first; `fednca flower check .` then says what is wrong, at the server and at each site.

## SuperLink (server's machine, in the folder `server`)

{warning}Open TCP port {port} for the sites' addresses only: who reaches it can start runs, that is, execute code.

```sh
{settings}
{superlink}
```
"""
REGISTER = """
## Register the nodes' public keys (server's machine, another terminal, in the folder `server`)

```sh
{settings}
{commands}
```
"""
NODES = """
## SuperNodes (each in its own folder, at the site)

They call the SuperLink, and nobody calls them: a site opens no port.
"""
NODE = """
### {name}: in the folder `sites/{name}`

```sh
{settings}
{command}
```
"""
RUN = """
## Run (server's machine, in the folder `server`)

```sh
{settings}
{run}
```

`flwr ls trial` tells the run's status (an exit code of 0 does not mean that it went well), `flwr log RUN-ID trial`
what it says, and `flwr stop RUN-ID trial` ends it. The results are in `server/run`.

## Go on after a run that was stopped or killed

```sh
{settings}
{resume}
```
"""
SETTINGS = 'export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1'
INSECURE = "**Insecure**: nothing is encrypted, and anybody who reaches the port can be a site. Use no real data.\n\n"
AUTHORITY = " `authority/ca.key` signs certificates: keep it apart from all of them."


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
    """Return the command that starts a site's SuperNode; its own port is for its own processes."""
    safety = ["--insecure"] if insecure else ["--root-certificates=ca.crt", "--auth-supernode-private-key=node.key"]
    address = f"[{host}]" if ":" in host else host
    own = [f"--port={own_port}", '--node-config="site=\\"$PWD/site.toml\\""']
    return " \\\n  ".join([f"flower-supernode --superlink={address}:{port}", *safety, *own])


def run_command(resume: str) -> str:
    """Return the command that starts the run, or goes on with it."""
    return f'flwr run app trial --run-config "server=\\"$PWD/server.toml\\" resume={resume}" --stream'
