"""Our ClientApp with faults, for the end-to-end test: the environment says which site does what in which round."""

import json
import os
import time
from pathlib import Path

import torch
from flwr.clientapp import ClientApp

from fednca.flower.app import client as honest
from fednca.flower.config import load_site
from fednca.flower.records import from_arrays, to_arrays

client = ClientApp()


@client.query()
def query(message, context):
    return honest(message, context)


@client.evaluate()
def evaluate(message, context):
    return honest(message, context)


@client.train()
def train(message, context):
    site = load_site(Path(context.node_config["site"]))
    fault = json.loads(os.environ["FAULTS"]).get(f"{site.name} {message.metadata.group_id}")
    if fault == "hang":
        Path(site.root, "hangs").touch()
        time.sleep(600)
    reply = honest(message, context)
    if fault == "poison":
        weights = from_arrays(reply.content["weights"])
        weights["head.linear.weight"] = torch.full_like(weights["head.linear.weight"], torch.nan)
        reply.content["weights"] = to_arrays(weights)
    return reply
