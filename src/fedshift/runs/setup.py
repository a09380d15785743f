"""From an experiment's words to the objects they name; everything that can be wrong is found here, before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedshift.blocks.mean_views import check_views, with_views
from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.compatibility import missing_for_method, missing_for_pair
from fedshift.core.context import Context
from fedshift.core.method import Method, Train
from fedshift.core.options import parse_options
from fedshift.core.registry import ADAPTERS, METHODS, MODELS, construct, with_options
from fedshift.core.tree import Tensors, to
from fedshift.data._room import free_memory, gibibytes
from fedshift.data.concept import Rotation
from fedshift.data.partition import PARTITIONS
from fedshift.data.pool import Pool
from fedshift.data.sources import load
from fedshift.data.streams import STREAMS, Original, StreamKind, twins_of
from fedshift.data.task import Splitting, Task, build, task_hash
from fedshift.engines.base import Compute
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec, ModelSpec
from fedshift.privacy.settings import Privacy
from fedshift.runs.own_network import Network as Network
from fedshift.runs.own_network import arch_of
from fedshift.runs.private import Case, check_private, privacy_of
from fedshift.store.cache import cache_folder

EACH = "each"  # [split] unseen: every client in turn, which is several tasks; looked at as one, nobody is left out


def make_task(experiment: Experiment, seed: int, data: Pool | Task | None = None) -> Task:
    """The task of one seed. ``data`` replaces the experiment's source: a pool to divide, or a whole task.

    >>> task = make_task(Experiment(), seed=0)
    >>> len(task.clients)
    5
    """
    if isinstance(data, Task):
        return replace(data, hash=task_hash(data))
    wanted = split_as_own(experiment, data).split
    split = {key: value for key, value in wanted.items() if (key, value) != ("unseen", EACH)}
    return _built(experiment, with_options(Splitting, "[split]", split), streams_of(experiment), seed, data)


def make_twin(experiment: Experiment, seed: int, data: Pool | Task | None = None) -> Task:
    """The task with validation images in place of all test images, under the same shifts as far as they can be.

    What is chosen by it is chosen without a test label. Raises a UserError if a client has no validation images.

    >>> task, twin = make_task(Experiment(), 0), make_twin(Experiment(), 0)
    >>> bool((twin.streams["original"].index["pen"].sort().values == task.client("pen").val).all())
    True
    """
    if isinstance(data, Task):
        return _shown_validation(data)
    splitting = with_options(Splitting, "[split]", {**split_as_own(experiment, data).split, "tune": True})
    return _built(experiment, splitting, twins_of(streams_of(experiment)), seed, data)


def _shown_validation(task: Task) -> Task:
    """Of a task of the user's own only plain streams can be made again."""
    for client in task.clients:
        if not len(client.val):
            raise UserError(f"client {client.name!r} has no validation images")
    plain = [stream for stream in task.streams.values() if stream.kind == Original.kind]
    index = {client.name: client.val for client in task.clients}
    return replace(
        task,
        clients=tuple(replace(client, test=client.val) for client in task.clients),
        unseen=(),
        streams={stream.name: replace(stream, index=index) for stream in plain},
    )


def streams_of(experiment: Experiment) -> dict[str, StreamKind]:
    """The kinds of the experiment's streams, by name."""
    return {
        stream.name: with_options(
            _found(STREAMS, "stream kind", stream.kind), f"stream {stream.name!r}", stream.options()
        )
        for stream in experiment.stream
    }


def _built(
    experiment: Experiment, splitting: Splitting, streams: Mapping[str, StreamKind], seed: int, data: Pool | None
) -> Task:
    spec = experiment.data
    cache = cache_folder()
    partition = with_options(
        _found(PARTITIONS, "partition", experiment.partition.kind),
        f"partition {experiment.partition.kind!r}",
        experiment.partition.options(),
    )
    rotation = with_options(Rotation, "[rotation]", experiment.rotation)
    data_seed = seed if spec.seed is None else spec.seed
    pool = data
    if pool is None:
        pool = load(spec.source, spec.columns or None, spec.size, spec.channels, cache, spec.attributes, spec.window)
    pool = pool.carrying(spec.attributes).only(spec.domains, spec.classes)
    if spec.limit is not None and spec.limit < len(pool):
        pool = pool.take(rng.permutation(rng.seed_of(data_seed, "limit"), len(pool))[: spec.limit].sort().values)
    shape = tuple(pool.images.shape[1:])

    def another(source: str, columns: Mapping[str, str]) -> Pool:
        if shape[1] != shape[2]:
            raise UserError(f"images of {source} can join square ones only, not {shape[2]}x{shape[1]}; set [data] size")
        return load(source, columns or None, int(shape[1]), int(shape[0]), cache, window=spec.window)

    return build(pool, partition, splitting, streams, data_seed, cache, rotation, another)


def split_as_own(experiment: Experiment, data: Pool | Task | None) -> Experiment:
    """The experiment, which splits a pool that is given to it class by class, as files of one's own have it.

    >>> pool = Pool(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0]), ("a",))
    >>> split_as_own(Experiment(), pool).split, split_as_own(Experiment(), None).split
    ({'stratify': True}, {})
    """
    if not isinstance(data, Pool) or "stratify" in experiment.split:
        return experiment
    return experiment.model_copy(update={"split": {"stratify": True, **experiment.split}})


def _found(table: Mapping[str, Any], noun: str, name: str) -> Any:
    if name not in table:
        raise UserError(f"there is no {noun} {name!r}; there are: {', '.join(sorted(table))}")
    return table[name]


@dataclass(frozen=True)
class Setup:
    """A method with its networks, ready to train on one task."""

    spec: MethodSpec
    methods: Mapping[str, Method]  # by architecture; all but mixed federations have one
    train: Train
    privacy: Privacy | None = None  # what uploads go through

    @property
    def method(self) -> Method:
        """The method on the first architecture; the server half is called on it."""
        return next(iter(self.methods.values()))

    def of(self, number: int) -> tuple[str, Method]:
        """The architecture's name and method of client ``number``."""
        names = list(self.methods)
        name = names[max(number, 0) % len(names)]
        return name, self.methods[name]

    def initial(self, seed: int, compute: Compute) -> dict[str, Tensors]:
        """What everybody starts from under this seed, by architecture."""
        starts = {name: method.arch.init(rng.seed_of(seed, "init")) for name, method in self.methods.items()}
        return to(starts, compute.device, compute.dtype)

    @cached_property
    def plain(self) -> dict[str, Adapter]:
        """No adaptation, by architecture."""
        return self.adapters(AdapterSpec(name="none"))

    def adapters(self, spec: AdapterSpec, ctx: Context | None = None) -> dict[str, Adapter]:
        """An adapter of models of this moment (the start, if none is given), by architecture."""
        return {name: self.adapter(spec, method, ctx) for name, method in self.methods.items()}

    def adapter(self, spec: AdapterSpec, method: Method, ctx: Context | None = None) -> Adapter:
        """An adapter on a method's deployed models; raises if the pair is not valid."""
        entry = ADAPTERS[spec.name]
        viewed = "views" in spec.options() and "views" not in entry.options
        cls = with_views(entry.make) if viewed else entry.make
        adapter = with_options(
            cls, f"adapter {spec.name!r}", spec.options(), arch=method.arch, predict_with=method.predict
        )
        if viewed:
            check_views(spec.name, adapter)
        reason = missing_for_pair(self.spec.title, method.provides, spec.name, adapter)
        if reason:
            raise UserError(reason)
        decay = 1.0 if ctx is None else replace(ctx, stage="final").decay(self.train)  # of what is already trained
        return adapter.at(self.train.lr * decay)


def make_setup(
    experiment: Experiment,
    spec: MethodSpec,
    task: Task,
    network: Network | None = None,
    clients: int | None = None,
    trains: bool = True,
) -> Setup:
    """A method of an experiment, built on its networks and checked with all its adapters.

    ``clients``: of the whole federation, where the task has only some of them. What has been trained already (``trains`` is
    false) need not keep what ``[privacy]`` promises of training, and its task may have no clients.
    """
    shared, own = (parse_options(Train, "[train]", table) for table in (experiment.train, spec.train))
    train = construct(Train, "[train]", **{**shared, **own})
    cls = METHODS[spec.name].make
    what = f"method {spec.name!r}"
    options = parse_options(cls, what, spec.options(), fixed=("arch", "train"))
    methods: dict[str, Method] = {}
    for model in experiment.models:
        arch = cls.build(make_arch(experiment, model, spec.model, task, network), options)
        made = construct(cls, what, arch=arch, train=train, **options)
        check_method(spec.name, made)
        name = model.label or arch.name
        methods[name if name not in methods else f"{name}-{len(methods)}"] = made
    setup = Setup(spec, methods, train, privacy_of(experiment, spec))
    for adapter in spec.adapters:
        for method in methods.values():
            setup.adapter(adapter, method)
    if setup.privacy is not None and trains:
        check_private(Case(setup.privacy, setup.method, experiment, spec, clients or len(task.clients)))
    return setup


def check_method(name: str, method: Method) -> None:
    """Raise the sentence on why this method cannot run on its network, if there is one."""
    if reason := missing_for_method(name, method.requires, method.arch):
        raise UserError(reason)


def make_arch(
    experiment: Experiment, model: ModelSpec, changes: Mapping[str, Any], task: Task, network: Network | None
) -> Arch:
    """The backbone: the experiment's model, or the user's own network."""
    mean, std = experiment.data.mean, experiment.data.std
    if network is not None:
        arch = arch_of(network, task.shape, mean, std)
    else:
        options = {**model.options(), **changes}
        maker = with_options(MODELS[model.name].make, f"model {model.name!r}", options)
        shape, classes = task.shape, len(task.classes)  # the function below must not hold on to the task's images
        _check_fits(model.name, lambda: maker.make(shape, classes))
        arch = Arch.of(lambda: maker.make(shape, classes), shape, name=model.name, mean=mean, std=std)
    if arch.classes < len(task.classes):
        raise UserError(
            f"network {arch.name!r} gives {arch.classes} logits, but the data have {len(task.classes)} classes"
        )
    return arch


def _check_fits(name: str, make: Callable[[], nn.Module]) -> None:
    """Refuse a network that no memory holds. It is asked for its shapes alone: they take none."""
    try:
        with torch.device("meta"):
            shapes = make().state_dict().values()
        need = 4 * sum(leaf.numel() * leaf.element_size() for leaf in shapes)  # with gradients, momenta, a message
    except (RuntimeError, TypeError) as error:  # no memory on earth has as many bytes as can be counted
        if "overflow" not in str(error).lower() and "too large" not in str(error).lower():
            raise
        raise UserError(f"network {name!r} is too large for any machine") from None
    free = free_memory()
    if free is not None and need > free:
        raise UserError(f"training network {name!r} needs {gibibytes(need)} of memory, and {gibibytes(free)} are free")


def with_baselines(experiment: Experiment) -> list[MethodSpec]:
    """The experiment's methods, and before them the rows that are always there."""
    present = {spec.name for spec in experiment.method}
    wanted = [] if not experiment.baselines or len(experiment.models) > 1 else ["majority", "local", "finetune"]
    if experiment.privacy:  # counts of classes would be told
        wanted = [name for name in wanted if METHODS[name].make.linear]
    return [*(MethodSpec(name=name) for name in wanted if name not in present), *experiment.method]


def placeholder(shape: tuple[int, int, int], classes: Sequence[str]) -> Task:
    """A task without images: all that making a network takes.

    >>> placeholder((3, 8, 8), ["cat", "dog"]).shape
    (3, 8, 8)
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    return Task(torch.zeros(0, *shape, dtype=torch.uint8), nothing, nothing, tuple(classes), ())
