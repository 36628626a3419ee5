"""The base of every typed group of settings: the config tree, a method's hyper-parameters, a dataset's options."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Immutable, validated settings; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
