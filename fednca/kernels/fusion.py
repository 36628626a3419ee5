"""Find which modules of a model our kernels can do, and let the kernels do them.

Two things show only while a model runs: what type of map a module is given, and whether the output of a BatchNorm goes
to a ReLU and nowhere else, so that one kernel can do both. So the model is watched in one forward pass. Modules that
fit then change their class; weights, buffers and their names stay, so state dicts stay the same.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fednca.kernels import layers


@dataclass(frozen=True)
class Input:
    """What a module was given in a forward pass."""

    channels: int
    dtype: torch.dtype


@dataclass
class Plan:
    """What can be fused, by path: modules with their input, and the ReLUs that the BatchNorms before them can do."""

    norms: dict[str, Input] = field(default_factory=dict)
    pools: dict[str, Input] = field(default_factory=dict)
    stems: dict[str, Input] = field(default_factory=dict)
    relus: dict[str, str] = field(default_factory=dict)  # path of a BatchNorm → path of the ReLU behind it
    blocks: dict[str, str] = field(default_factory=dict)  # path of a BatchNorm → path of the residual block it ends


@cache
def available() -> bool:
    """Return whether kernels can be compiled and launched here, by the smallest of them."""
    # Triton needs a C compiler and a GPU that is new enough; only a trial shows whether they are there.
    if not torch.cuda.is_available():
        return False

    def compile_smallest() -> None:
        from fednca.kernels.pooling import warm_up

        warm_up(8, torch.float32, torch.device("cuda", torch.cuda.current_device()))

    return works(compile_smallest)


def watch(model: nn.Module, run: Callable[[], object]) -> Plan:
    """Return what can be fused, seen while `run` passes a batch forward through the model as in training."""
    watcher = _Watcher()
    handles = []
    for path, module in model.named_modules():
        if layers.fits_norm(module):
            handles.append(module.register_forward_pre_hook(partial(watcher.enter, watcher.plan.norms, path)))
            handles.append(module.register_forward_hook(partial(watcher.leave, path)))
        elif layers.fits_pool(module):
            handles.append(module.register_forward_pre_hook(partial(watcher.enter, watcher.plan.pools, path)))
        elif layers.fits_stem(module):
            handles.append(module.register_forward_pre_hook(partial(watcher.enter, watcher.plan.stems, path)))
        elif type(module) is nn.ReLU and module.inplace:  # else the value before it might be used as well
            handles.append(module.register_forward_pre_hook(partial(watcher.rectify, path)))
    try:
        with watcher:
            run()
    finally:
        for handle in handles:
            handle.remove()
    plan = watcher.conclude()
    if "timm.models.resnet" in sys.modules:  # else no block is one of its, and importing it takes long
        from fednca.kernels.residual import last_norm

        ends = {f"{path}.{last_norm(module)}": path for path, module in model.named_modules()}
        plan.blocks = {norm: path for norm, path in ends.items() if norm in plan.norms}
    return plan


def accelerate(model: nn.Module, plan: Plan) -> nn.Module:
    """Let a model use the kernels where the plan says so, and return it; weights, buffers and their names stay."""
    modules = dict(model.named_modules())
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type == layers.DEVICE:
        plan = compiled(plan, modules, device)
    for path, seen in plan.norms.items():
        norm = modules[path]
        norm.__dict__.update(relu=path in plan.relus | plan.blocks, dtype=seen.dtype)
        norm.__class__ = layers.FusedBatchNorm2d
    for relu in plan.relus.values():
        modules[relu].__class__ = nn.Identity
    if plan.blocks:
        from fednca.kernels.residual import FUSED

        for path in plan.blocks.values():
            modules[path].__class__ = FUSED[type(modules[path])]
    for own, fast in ((plan.pools, layers.FusedMaxPool2d), (plan.stems, layers.FusedStem)):
        for path, seen in own.items():
            modules[path].__dict__.update(dtype=seen.dtype)
            modules[path].__class__ = fast
    return model


def compiled(plan: Plan, modules: dict[str, nn.Module], device: torch.device) -> Plan:
    """Compile what batches of any size need, before a step is captured; the plan loses what this GPU cannot do.

    Triton compiles a kernel when it is first launched, which a capture does not allow.
    """

    def compile_norms() -> None:
        from fednca.kernels import inference, norms

        for path, seen in plan.norms.items():
            relu, add = path in plan.relus | plan.blocks, path in plan.blocks
            for kernels in (norms, inference):
                kernels.warm_up(seen.channels, seen.dtype, relu, device, add)

    def compile_pools() -> None:
        from fednca.kernels import pooling

        for seen in plan.pools.values():
            pooling.warm_up(seen.channels, seen.dtype, device)

    def compile_stems() -> None:
        from fednca.kernels import stem

        for path, seen in plan.stems.items():
            stem.warm_up(modules[path].out_channels, seen.dtype, device)

    kinds = {compile_norms: ("norms", "relus", "blocks"), compile_pools: ("pools",), compile_stems: ("stems",)}
    return Plan(**{name: getattr(plan, name) for each, names in kinds.items() if works(each) for name in names})


def works(compile_kernels: Callable[[], None]) -> bool:
    """Return whether kernels can be compiled and launched."""
    try:
        compile_kernels()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # not the device: another run may be capturing a graph on it
    except Exception:  # noqa: BLE001 (no triton, no C compiler, a GPU too old or too small: all of them mean the same)
        return False
    return True


class _Watcher(TorchFunctionMode):
    """Follows the outputs of BatchNorms to whatever uses them first.

    Hooks see modules only. A sum such as `y += x`, or a function such as `F.relu`, is seen by `__torch_function__`,
    through which torch passes every operation while this mode is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan()
        self.unused: dict[int, tuple[str, Tensor]] = {}  # outputs that nothing has used, kept so that no id comes again
        self.users: dict[str, set[str]] = {}  # path of a BatchNorm → paths of ReLUs, or "" for another use
        self.sources: dict[str, set[str]] = {}  # path of a ReLU → paths of BatchNorms, or ""
        self.unfit: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Note every use of an output: views, sums in place and attributes among them."""
        for leaf in tree_leaves((args, kwargs)):
            self.use(leaf, "")
        return func(*args, **(kwargs or {}))

    def use(self, x: object, user: str) -> str:
        """Note who uses a tensor, and return the BatchNorm that it comes from untouched, if so."""
        path, _ = self.unused.pop(id(x), ("", None))
        if path:
            self.users[path].add(user)
        return path

    def enter(self, seen: dict[str, Input], path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note a module's input; one that is not the same every time, or of a type we have no kernel for, is unfit."""
        if len(inputs) != 1 or inputs[0].ndim != 4:
            self.unfit.add(path)
            return
        given = Input(inputs[0].shape[1], inputs[0].dtype)
        if seen.setdefault(path, given) != given or given.dtype not in layers.DTYPES:
            self.unfit.add(path)

    def leave(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Note a BatchNorm's output."""
        self.users.setdefault(path, set())
        self.unused[id(output)] = (path, output)

    def rectify(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note where a ReLU's input comes from."""
        self.sources.setdefault(path, set()).add(self.use(inputs[0], path) if inputs else "")

    def conclude(self) -> Plan:
        """Return the plan; a BatchNorm and a ReLU are a pair where neither had to do with anything else."""
        for path, _ in self.unused.values():
            self.users[path].add("")
        for seen in (self.plan.norms, self.plan.pools, self.plan.stems):
            for path in self.unfit & seen.keys():
                del seen[path]
        for path in self.plan.norms:
            for relu in self.users[path]:
                if self.users[path] == {relu} and self.sources.get(relu) == {path}:
                    self.plan.relus[path] = relu
        return self.plan
