"""A local page to drop an image on: it shows probabilities as bars and the evidence for any class on the image."""

import html
import ipaddress
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednca.base.errors import FedncaError
from fednca.base.packages import needed
from fednca.data.images import ImageError, read_image
from fednca.models.evidence import has_attention
from fednca.models.overlay import overlay, shrink
from fednca.use.data import Example, examples
from fednca.use.model import TrainedModel, to_pixels

SHOWN = 384  # pixels; smaller pictures are enlarged to about this size
HOUR = 3600  # seconds after which an uploaded image is deleted
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
STYLE = """
.bars {display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px; align-items: center;
       max-height: 520px; overflow-y: auto; padding: 2px}
.bars .name {overflow-wrap: anywhere; max-width: 16em}
.bars .track {position: relative; height: 16px; border-radius: 3px; background: var(--background-fill-secondary);
              border: 1px solid var(--border-color-primary)}
.bars .bar {position: absolute; inset: 0 auto 0 0; border-radius: 2px; background: var(--neutral-400)}
.bars .found .bar {background: #0072b2}
.bars .mark {position: absolute; top: -4px; bottom: -4px; width: 2px; background: var(--body-text-color)}
.bars .found.name, .bars .found.number {font-weight: 600}
.bars .number {font-variant-numeric: tabular-nums; text-align: right}
.legend {opacity: 0.75; font-size: var(--text-sm); margin-top: 8px}
.problem {padding: 8px 12px; border-radius: 6px; border: 1px solid #d55e00; color: var(--body-text-color)}
.html-container {padding: 0 !important}
#examples, #examples .grid-wrap {min-height: 0; height: auto; max-height: none}
#examples .grid-container {grid-template-columns: repeat(4, minmax(0, 1fr))}
#image img, #evidence img {max-height: 60vh; object-fit: contain}
"""

# Treat a dropped file like one chosen by a click: gradio's own handling of drops breaks after a failed upload.
SCRIPT = """<script>
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
    event.preventDefault();
    event.stopPropagation();
    const input = document.querySelector("#drop input[type=file]");
    if (!input || !event.dataTransfer.files.length) return;
    const first = new DataTransfer();
    first.items.add(event.dataTransfer.files[0]);
    input.files = first.files;
    input.dispatchEvent(new Event("change", {bubbles: true}));
}, true);
</script>"""


class Page:
    """The actions of the page; every method returns new values for its parts."""

    def __init__(self, model: TrainedModel, pictures: list[Example], folder: Path, gradio: Any) -> None:  # noqa: ANN401
        """Write the examples to a folder, so that they can be read like uploaded images."""
        self.model, self.pictures, self.gradio = model, pictures, gradio
        self.examples = [folder / f"example-{number}.png" for number in range(len(pictures))]
        for file, example in zip(self.examples, pictures, strict=True):
            Image.fromarray(example.picture).save(file)

    def look(self, path: str, shown: str) -> list[Any]:
        """Score an image; return problem, bars, class choice, image name, image, evidence and path."""
        update = self.gradio.update
        try:
            picture = read_image(Path(path))
            pixels = to_pixels(picture, self.model.size)[None]
        except (FedncaError, MemoryError) as error:
            told = update(value=problem(path, error), visible=True)
            return [told, "", update(value=None, interactive=False), "Image", None, None, None]
        scores = self.model.score(pixels)[0]
        number = int(scores.argmax())
        large = enlarge(shrink(picture))
        drawn = overlay(large, self.model.evidence(pixels, [number])[0, 0])
        silent = update(value="", visible=False)
        chosen = update(value=self.model.classes[number], interactive=True)
        return [silent, bars(self.model, scores.tolist()), chosen, html.escape(shown), large, drawn, path]

    def look_at_upload(self, path: str) -> list[Any]:
        """Score an uploaded image, and clear the upload area for the next one."""
        return [*self.look(path, Path(path).name), None]

    def look_at_example(self, number: int) -> list[Any]:
        """Score an example, and name the classes it shows."""
        labels = ", ".join(self.pictures[number].labels) or "none of the classes"
        return self.look(str(self.examples[number]), f"Test image that shows {labels}")

    def show(self, path: str | None, name: str | None) -> NDArray[np.uint8] | None:
        """Draw the evidence for a class over the image."""
        if path is None or name is None:
            return None
        picture = read_image(Path(path))
        pixels = to_pixels(picture, self.model.size)[None]
        heat = self.model.evidence(pixels, [self.model.classes.index(name)])[0, 0]
        return overlay(enlarge(shrink(picture)), heat)


def build_page(model: TrainedModel, folder: Path) -> Any:  # noqa: ANN401 (gradio's)
    """Build the page; the examples are written to `folder`."""
    gr = needed("gradio", "serve")
    pictures = examples(model.run)
    page = Page(model, pictures, folder, gr)
    kind = "attention" if has_attention(model.model) else "Grad-CAM"

    def choose(event: Any) -> list[Any]:  # noqa: ANN401
        return page.look_at_example(event.index)

    choose.__annotations__["event"] = gr.SelectData  # tells gradio what to pass
    title = f"{model.run.title} on {model.data}"
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(HOUR, HOUR)) as app:
        gr.Markdown(heading(model))
        path = gr.State(None, time_to_live=HOUR)
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                file = gr.File(label="Your image", elem_id="drop", height=150)
                message = gr.HTML(elem_id="message", visible=False)
                if pictures:
                    gr.Markdown("or choose one of these test images:")
                    gallery = gr.Gallery(
                        [enlarge(shrink(each.picture)) for each in pictures],
                        show_label=False,
                        elem_id="examples",
                        format="png",
                        columns=4,
                        allow_preview=False,
                        interactive=False,
                        buttons=[],
                    )
            with gr.Column(scale=3, min_width=320):
                options = {"format": "png", "interactive": False, "show_label": False, "buttons": []}
                with gr.Row():
                    with gr.Column(min_width=160):
                        shown = gr.HTML("Image", elem_id="shown")
                        image = gr.Image(elem_id="image", **options)
                    with gr.Column(min_width=160):
                        gr.HTML(f"Evidence ({kind})")
                        evidence = gr.Image(elem_id="evidence", **options)
                chosen = gr.Dropdown(
                    list(model.classes), value=None, label="Show the evidence for", elem_id="class", interactive=False
                )
                probabilities = gr.HTML(elem_id="probabilities")
        outputs = [message, probabilities, chosen, shown, image, evidence, path]
        file.upload(page.look_at_upload, file, [*outputs, file], **ONE_AT_A_TIME)
        if pictures:
            gallery.select(choose, None, outputs, **ONE_AT_A_TIME)
        chosen.input(page.show, [path, chosen], evidence, **ONE_AT_A_TIME)
    return app


def heading(model: TrainedModel) -> str:
    """Describe the model, with its warning if it has one."""
    run = model.run
    thresholds = "thresholds calibrated on validation images" if model.calibrated else "threshold 0.5 for every class"
    facts = f"{len(model.classes)} classes, round {model.round} of {run.config.train.rounds}, {thresholds}"
    note = f"\n\n**{html.escape(model.note[0].upper() + model.note[1:])}.**" if model.note else ""
    return f"# {html.escape(run.title)} on {html.escape(model.data)}\n{facts}{note}"


def bars(model: TrainedModel, scores: list[float]) -> str:
    """Draw the probabilities as bars, highest first, with a mark at each threshold."""
    rows = sorted(zip(model.classes, scores, model.thresholds.tolist(), strict=True), key=lambda row: -row[1])
    lines = []
    for name, score, threshold in rows:
        found = " found" if score > threshold else ""
        lines.append(
            f'<div class="name{found}">{html.escape(name)}</div>'
            f'<div class="track{found}" title="threshold {threshold:.3f}">'
            f'<div class="bar" style="width: {100 * score:.2f}%"></div>'
            f'<div class="mark" style="left: calc({100 * threshold:.2f}% - 1px)"></div></div>'
            f'<div class="number{found}">{100 * score:.1f}%</div>'
        )
    legend = '<div class="legend">A class counts as found (blue) above its threshold, the mark on its bar.</div>'
    return f'<div class="bars">{"".join(lines)}</div>{legend}'


def problem(path: str, error: Exception) -> str:
    """Say what is wrong with an image, without showing where the server keeps it."""
    name = Path(path).name
    if isinstance(error, ImageError):
        said = f"'{name}' {error.problem}"
    else:
        said = str(error).replace(path, name) or "this image needs more memory than there is"
    return f'<div class="problem" role="alert">{html.escape(said)}. Try another image.</div>'


def enlarge(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarge a small picture by repeating its pixels."""
    times = max(1, round(SHOWN / max(picture.shape[:2])))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def stay_at_home(host: str, folder: str) -> None:
    """Make gradio send no analytics, reach its page without a proxy, and keep uploads in a temporary folder."""
    around = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [around, "localhost", host]))
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = folder


def end_orderly(number: int, frame: object) -> None:
    """Exit by an exception when the process is stopped or its terminal closes, so that uploads are removed."""
    raise SystemExit(128 + number)


def serve(model: TrainedModel, host: str, port: int, max_mb: float, announce: Callable[[str], None]) -> None:
    """Show the page until the process is stopped; `announce` is called with its address."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end_orderly)
    with TemporaryDirectory(prefix="fednca-") as folder:
        stay_at_home(host, folder)
        gr = needed("gradio", "serve")
        app = build_page(model, Path(folder))
        theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        _, url, _ = app.launch(
            server_name=host,
            server_port=port,
            share=False,
            max_file_size=int(max_mb * 2**20),
            theme=theme,
            css=STYLE,
            head=SCRIPT,
            footer_links=[],
            enable_monitoring=False,
            ssr_mode=False,
            mcp_server=False,
            show_error=True,
            quiet=True,
            prevent_thread_lock=True,
        )
        try:
            announce(url)
            threading.Event().wait()
        finally:
            app.close(verbose=False)
