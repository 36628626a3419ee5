"""The commands that use a trained model: `predict`, `evaluate`, `export` and `serve`."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednca.base.errors import FedncaError
from fednca.cli.flags import not_empty, whole

if TYPE_CHECKING:
    from rich.console import Console

    from fednca.data.images import ImageError
    from fednca.use.model import TrainedModel

Add = Callable[[str, Callable[..., None], str], ArgumentParser]
KINDS = ("onnx", "torchscript", "safetensors")


def add_commands(add: Add) -> None:
    """Add the commands and their flags; `add` creates a command from its name, function and help text."""
    predict = add("predict", run_predict, "Find out what images show, with a trained model.")
    evaluate = add(
        "evaluate", run_evaluate, "Measure a trained model on new labelled images, with confidence intervals."
    )
    export = add("export", run_export, "Write a trained model as one file for other programs, with a model card.")
    serve = add("serve", run_serve, "Open a local page: drop an image on it and see what a trained model finds where.")
    for sub in (predict, evaluate, export, serve):
        sub.add_argument("run", metavar="RUN", help="folder of the run")
    add_predict_flags(predict)
    add_evaluate_flags(evaluate)
    export.add_argument("--to", required=True, choices=KINDS, help="kind of file")
    export.add_argument(
        "--out", metavar="FILE", help="file to write (default: RUN/export/model.onnx, .pt or .safetensors)"
    )
    serve.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    serve.add_argument(
        "--port", metavar="N", type=whole(1, 65535), default=7860, help="port to listen on (default: 7860)"
    )
    serve.add_argument("--max-mb", metavar="N", type=float, default=20, help="largest image to accept (default: 20)")
    for sub in (predict, evaluate, serve):
        sub.add_argument("--device", metavar="NAME", default="auto", help="auto (the default), cpu, cuda or cuda:N")


def add_predict_flags(predict: ArgumentParser) -> None:
    """Add the flags of `predict`."""
    predict.add_argument("images", metavar="IMAGES", nargs="+", help="image files, or folders of them")
    add_threshold(predict)
    kinds = predict.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="write JSON instead of a table")
    kinds.add_argument("--csv", action="store_true", help="write CSV, the default when the output is not a terminal")
    predict.add_argument("--out", metavar="FILE", help="write to this file, as JSON or CSV by its ending")
    predict.add_argument("--evidence", metavar="DIR", help="write pictures that show where the classes were found")


def add_evaluate_flags(evaluate: ArgumentParser) -> None:
    """Add the flags of `evaluate`."""
    evaluate.add_argument("--data", metavar="DIR", required=True, help="folder with labels.csv and the images")
    evaluate.add_argument("--table", metavar="FILE", help="the table, inside the folder (default: labels.csv)")
    columns = evaluate.add_argument_group(
        "columns of the table", "By default those of the training table, if the new one has them."
    )
    columns.add_argument("--label-column", metavar="NAME", help="column that names the classes of an image")
    columns.add_argument(
        "--separator", metavar="TEXT", type=not_empty, help="text between two class names (default: |)"
    )
    columns.add_argument(
        "--group-column", metavar="NAME", help="column whose equal values are resampled together, such as the patient"
    )
    evaluate.add_argument(
        "--split", choices=["train", "val", "test"], help="use only the rows of this split (default: all)"
    )
    evaluate.add_argument("--by", metavar="COLUMN", help="also give metrics for each value of this column")
    evaluate.add_argument("--ignore-extra", action="store_true", help="ignore classes that the model does not know")
    add_threshold(evaluate)
    evaluate.add_argument(
        "--resamples", metavar="N", type=whole(1), default=1000, help="resamples of the bootstrap (default: 1000)"
    )
    evaluate.add_argument(
        "--confidence", metavar="X", type=float, default=0.95, help="confidence of the intervals (default: 0.95)"
    )
    evaluate.add_argument("--seed", metavar="N", type=whole(0), default=0, help="seed of the bootstrap (default: 0)")
    evaluate.add_argument("--json", action="store_true", help="write JSON instead of tables")
    evaluate.add_argument("--out", metavar="FILE", help="also write the JSON to this file")


def add_threshold(parser: ArgumentParser) -> None:
    """Add the flags that `predict` and `evaluate` share."""
    parser.add_argument(
        "--threshold",
        metavar="calibrated|X",
        default="calibrated",
        help="probability above which a class counts as found: `calibrated` (default), each class's own threshold that "
        "the run chose on validation images, or one number for all classes",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=whole(1), default=64, help="images scored at once (default: 64)"
    )


def run_predict(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print or write the model's predictions; name unreadable images on stderr."""
    kind = output_kind(arguments, console)
    from fednca.data.images import ImageError
    from fednca.use.predict import Prediction, predict, to_csv, to_json
    from fednca.use.reading import find_images
    from fednca.use.tables import predictions_table

    paths = find_images(arguments.images)
    model = open_model(arguments)
    evidence = None if arguments.evidence is None else make_folder(Path(arguments.evidence))
    out = None if arguments.out is None else prepare_file(arguments.out)
    found, failed = list[Prediction](), list[ImageError]()
    with progress("scoring images", len(paths)) as advance:
        options = {"batch_size": arguments.batch_size, "evidence": evidence}
        for each in predict(model, paths, arguments.threshold, **options):
            advance(1)
            if isinstance(each, ImageError):
                failed.append(each)
            else:
                found.append(each)
    tell_failed(failed)
    if not found:
        raise FedncaError(f"none of the {len(paths)} images could be read")
    if kind == "table":
        console.print(predictions_table(model.run.title, found))
        return
    content = to_csv(model.classes, found) if kind == "csv" else to_json(model, arguments.threshold, found, failed)
    write(content, out)


def run_evaluate(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Print metrics with confidence intervals: overall, by class, and by the values of a column."""
    if not 0 < arguments.confidence < 1:
        raise FedncaError(f"--confidence {arguments.confidence:g} is not between 0 and 1; give a number such as 0.95")
    from fednca.use.bootstrap import Resampling
    from fednca.use.evaluate import Reading, evaluate, read_labelled, trained_by
    from fednca.use.tables import classes_table, fit, means_table

    model = open_model(arguments)
    names = ("table", "label_column", "separator", "group_column", "split", "by", "ignore_extra")
    reading = Reading(**{name: getattr(arguments, name) for name in names})
    data = read_labelled(Path(arguments.data), model.classes, reading, trained_by(model.run))
    warn_of_training_data(model, arguments)
    out = None if arguments.out is None else prepare_file(arguments.out)
    how = Resampling(arguments.resamples, arguments.confidence, arguments.seed)
    with progress("scoring images", len(data.paths)) as advance:
        facts, failed = evaluate(model, data, arguments.threshold, how, arguments.batch_size, advance)
    tell_failed(failed)
    about = {
        "run": str(model.run.folder),
        "method": model.run.title,
        "round": model.round,
        "finished": model.finished,
        "data": arguments.data,
        "threshold": arguments.threshold,
        "resamples": how.resamples,
        "confidence": how.confidence,
        "seed": how.seed,
        "unreadable": [{"image": str(error.path), "problem": error.problem} for error in failed],
    }
    content = json.dumps(about | facts, indent=1, ensure_ascii=False) + "\n"
    if out is not None:
        write(content, out)
    if arguments.json:
        write(content, None)
        return
    unit = "images" if facts["groups"] is None else f"{facts['groups']} groups"
    title = f"{model.run.title} on {arguments.data}: percent with {how.confidence:.0%} intervals, {unit} resampled"
    means = partial(means_table, title, [("all", facts), *facts.get("by", {}).items()])
    console.print(fit(means, console), fit(partial(classes_table, facts["classes"]), console))


def warn_of_training_data(model: "TrainedModel", arguments: Namespace) -> None:
    """Warn on stderr if the model is measured on its own training data."""
    root = model.run.placed.data.root
    if root is not None and Path(root).resolve() == Path(arguments.data).resolve() and arguments.split != "test":
        sys.stderr.write(
            f"fednca: '{arguments.data}' is what the model was trained on, so expect worse on other images\n"
        )


def run_export(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Write the model and its card, and print how closely the file agrees with the model."""
    from fednca.use.export import SUFFIXES, export

    model = open_model(arguments, device="cpu")
    path = Path(arguments.out or model.run.folder / "export" / f"model{SUFFIXES[arguments.to]}")
    if path.is_dir():
        raise FedncaError(f"'{path}' is a folder; name a file in it")
    difference, card = export(model, arguments.to, path)
    said = f"{path}: {path.stat().st_size / 1e6:.2f} MB, within {difference:.1g} of the model; model card: {card}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)


def run_serve(arguments: Namespace, overrides: dict[str, Any], console: "Console") -> None:
    """Show the page until Ctrl-C."""
    if not 0 < arguments.max_mb < float("inf"):
        raise FedncaError(f"--max-mb {arguments.max_mb:g} is not a size above 0; give megabytes, such as 20")
    check_address(arguments.host, arguments.port)
    from fednca.use.serve import is_loopback, serve

    if not is_loopback(arguments.host):
        sys.stderr.write(f"fednca: anyone who can reach {arguments.host} can use the page; there is no password\n")

    def announce(url: str) -> None:
        console.print(f"{url} (Ctrl-C stops)", highlight=False, markup=False, soft_wrap=True)

    serve(open_model(arguments), arguments.host, arguments.port, arguments.max_mb, announce)


def open_model(arguments: Namespace, device: str | None = None) -> "TrainedModel":
    """Load the model of the run, and print its note, if it has one, on stderr."""
    from fednca.runs import Run
    from fednca.use.model import TrainedModel

    model = TrainedModel(Run(arguments.run), device or arguments.device)
    if model.note:
        sys.stderr.write(f"fednca: {model.note}\n")
    return model


def output_kind(arguments: Namespace, console: "Console") -> str:
    """Choose table, JSON or CSV: by the flags, else the file's ending, else a table on a terminal and CSV without."""
    if arguments.json or arguments.csv:
        return "json" if arguments.json else "csv"
    if arguments.out is not None:
        ending = Path(arguments.out).suffix.lower()
        if ending not in {".json", ".csv"}:
            raise FedncaError(f"'{arguments.out}' ends neither in .json nor in .csv; add --json or --csv")
        return ending[1:]
    return "table" if console.is_terminal else "csv"


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before the model is loaded."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        host.encode("idna")  # an invalid host name would leave a socket open
        socket.create_server((host.strip("[]"), port), family=family).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedncaError(f"port {port} of {host} cannot be used ({reason}); choose another --port or --host") from None


def make_folder(folder: Path) -> Path:
    """Create a folder early, so that a failure costs no work."""
    from fednca.base.files import explain_write

    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepare_file(name: str) -> Path:
    """Create the folder of a file, and refuse a folder as the file, before any work is done."""
    path = Path(name)
    if path.is_dir():
        raise FedncaError(f"'{path}' is a folder; name a file in it")
    make_folder(path.parent)
    return path


def write(content: str, path: Path | None) -> None:
    """Write to a file, or to standard output; bytes of file names that are not UTF-8 are escaped as in JSON."""
    encoded = content.encode(errors="backslashreplace")
    if path is None:
        sys.stdout.write(encoded.decode())
        return
    from fednca.base.files import write_atomic

    write_atomic(path, encoded)


def tell_failed(failed: "list[ImageError]") -> None:
    """Name the images that could not be read on stderr."""
    for error in failed:
        sys.stderr.write(f"fednca: {error}\n")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if that is a terminal; yield a function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
