"""A model whose BatchNorms (each with the ReLU behind it) and max pools are done by kernels of our own in training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = "cuda"  # whose tensors the kernels take
DTYPES = {torch.bfloat16, torch.float32}
LARGEST = 2**31 - 1  # elements of a map, which the kernels count with 32 bits
ALIGNMENT = 16  # bytes, as the kernels were compiled for


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
    relus: dict[str, str] = field(default_factory=dict)  # path of a BatchNorm → path of the ReLU behind it


class FusedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d, and the ReLU behind it where there was one; what the kernels cannot take, torch does."""

    relu: bool
    dtype: torch.dtype  # for which the kernels were compiled

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps (N, C, H, W)."""
        several = input.numel() > self.num_features == input.shape[1]
        if self.training and several and usable(input, self.dtype):
            from fednca.engine.kernels import BatchNorm

            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            running = [self.running_mean, self.running_var]
            found: Tensor = BatchNorm.apply(input, self.weight, self.bias, running, self.momentum, self.eps, self.relu)
            return found
        normal = super().forward(input)
        return F.relu(normal, inplace=True) if self.relu else normal


class FusedMaxPool2d(nn.MaxPool2d):
    """MaxPool2d(3, 2, 1); what the kernels cannot take, torch does."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Return the maxima of windows of maps (N, C, H, W)."""
        if self.training and usable(input, self.dtype):
            from fednca.engine.pooling import MaxPool

            found: Tensor = MaxPool.apply(input)
            return found
        pooled: Tensor = super().forward(input)
        return pooled


def usable(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the kernels compiled for a type can take a map as it lies in memory."""
    return (
        x.device.type == DEVICE
        and x.dtype == dtype
        and x.ndim == 4
        and 0 < x.numel() <= LARGEST
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.data_ptr() % ALIGNMENT == 0
    )


@cache
def available() -> bool:
    """Tell whether kernels can be compiled and launched here."""
    if not torch.cuda.is_available():
        return False
    try:
        from fednca.engine.kernels import warm_up

        for dtype in DTYPES:
            warm_up(16, dtype, True, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 (no triton, no C compiler, a GPU too old: all of them mean the same)
        return False
    return True


def watch(model: nn.Module, run: Callable[[], object]) -> Plan:
    """See what can be fused while `run` passes something forward through the model, as in training."""
    watcher = _Watcher()
    handles = []
    for path, module in model.named_modules():
        if fits_norm(module):
            handles.append(module.register_forward_pre_hook(partial(watcher.enter, watcher.plan.norms, path)))
            handles.append(module.register_forward_hook(partial(watcher.leave, path)))
        elif fits_pool(module):
            handles.append(module.register_forward_pre_hook(partial(watcher.enter, watcher.plan.pools, path)))
        elif type(module) is nn.ReLU and module.inplace:  # else the value before it might be used as well
            handles.append(module.register_forward_pre_hook(partial(watcher.rectify, path)))
    try:
        with watcher:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return watcher.conclude()


def fuse(model: nn.Module, plan: Plan) -> nn.Module:
    """Let a model use the kernels where the plan says so, and return it; weights, buffers and their names stay."""
    modules = dict(model.named_modules())
    for path, seen in plan.norms.items():
        norm = modules[path]
        norm.__dict__.update(relu=path in plan.relus, dtype=seen.dtype)
        norm.__class__ = FusedBatchNorm2d
    for relu in plan.relus.values():
        modules[relu].__class__ = nn.Identity
    for path, seen in plan.pools.items():
        modules[path].__dict__.update(dtype=seen.dtype)
        modules[path].__class__ = FusedMaxPool2d
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type == DEVICE:
        compile_kernels(plan, device)
    return model


def compile_kernels(plan: Plan, device: torch.device) -> None:
    """Compile what the plan's modules need for batches of any size, before a step is captured."""
    from fednca.engine import kernels, pooling

    for path, seen in plan.norms.items():
        kernels.warm_up(seen.channels, seen.dtype, path in plan.relus, device)
    for seen in plan.pools.values():
        pooling.warm_up(seen.channels, seen.dtype, device)


def fits_norm(module: nn.Module) -> bool:
    """Tell whether a module is a BatchNorm that the kernels can do."""
    return (
        type(module) is nn.BatchNorm2d
        and module.affine
        and module.track_running_stats
        and module.momentum is not None
        and module.weight.dtype == torch.float32
    )


def fits_pool(module: nn.Module) -> bool:
    """Tell whether a module is the max pool that the kernels can do."""
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
        return False
    shape = (module.kernel_size, module.stride, module.padding, module.dilation)
    return [pair if isinstance(pair, tuple) else (pair, pair) for pair in shape] == [(3, 3), (2, 2), (1, 1), (1, 1)]


class _Watcher(TorchFunctionMode):
    """Follows the outputs of BatchNorms to whatever uses them first."""

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
        """Note a module's input."""
        if len(inputs) != 1 or inputs[0].ndim != 4:
            self.unfit.add(path)
            return
        given = Input(inputs[0].shape[1], inputs[0].dtype)
        if seen.setdefault(path, given) != given or given.dtype not in DTYPES:
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
        for seen in (self.plan.norms, self.plan.pools):
            for path in self.unfit & seen.keys():
                del seen[path]
        for path in self.plan.norms:
            for relu in self.users[path]:
                if self.users[path] == {relu} and self.sources.get(relu) == {path}:
                    self.plan.relus[path] = relu
        return self.plan
