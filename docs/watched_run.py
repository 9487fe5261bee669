"""Draw docs/tensorboard.png: a watched run on real text, killed and resumed, in TensorBoard's page; docs/console.txt.

torchrun --nproc-per-node 2 docs/watched_run.py      # train (two minutes on two CPU cores)
uv run --with playwright docs/watched_run.py         # take the picture, with Debian's chromium
"""

import os
import shutil
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

HERE, RUN = Path(__file__).parent, Path("checkpoints/watched_run")
TRAIN_ITERS, SAVE_AT, KILLED_AT, LOG_INTERVAL, EVAL_INTERVAL = 200, 100, 130, 10, 50
SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 128, 8, 16
TAGS = ("lm loss", "lm loss validation-held-out bits per byte", "learning-rate", "grad-norm", "iteration-time",
          "tokens-per-second")  # fmt: skip


def build():
    """A state, and the loaders of training and held-out text: the sources of the standard library, in bytes."""
    from loss_curve import build_state, build_text

    import minloop

    state = build_state({"tensor_model_parallel_size": 2})
    build_text()  # writes checkpoints/loss_curve_text
    config = minloop.build_dataset_config(
        sequence_length=SEQUENCE_LENGTH, tokenizer=minloop.build_byte_tokenizer(),
        blend=(["checkpoints/loss_curve_text/text"], None), split="95,5,0",
    )  # fmt: skip
    sets = minloop.build_gpt_datasets(config, (TRAIN_ITERS * GLOBAL_BATCH_SIZE, 64, 0), vocab_size=256)
    loaders = [minloop.build_loader(s, state.groups, micro_batch_size=MICRO_BATCH_SIZE) for s in sets[:2]]
    return state, *loaders


def train(until, resume):
    """One process's part of the run."""
    import minloop

    state, loader, held_out = build()
    if resume:
        minloop.load_checkpoint(RUN, state, loader)
    flops = minloop.flops_per_token(state.config, vocab_size=256, sequence_length=SEQUENCE_LENGTH)
    timer = minloop.StepTimer(state, sequence_length=SEQUENCE_LENGTH, flops_per_token=flops)
    count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, state.groups)
    sinks = []
    if minloop.is_first_rank(state.groups):
        console = (HERE / "console.txt").open("a" if resume else "w", buffering=1)
        sinks = [
            minloop.console_sink(train_iters=TRAIN_ITERS, write=lambda line: print(line, file=console)),
            minloop.jsonl_sink(RUN / "run.jsonl", iteration=state.iteration),
            minloop.tensorboard_sink(RUN / "tensorboard" / "tensor parallel 2"),
        ]
    while state.iteration < until:
        metrics, records = minloop.train_step(state, loader, num_microbatches=count), []
        if state.iteration % LOG_INTERVAL == 0:
            records = [minloop.step_record(state, metrics) | timer.lap()]
        if state.iteration % EVAL_INTERVAL == 0:
            with timer.paused():
                results = minloop.evaluate(
                    state, {"held-out": held_out}, num_microbatches=count, eval_iters=4, bytes_per_token=1
                )
            records.append(minloop.evaluation_record(state, results))
        if state.iteration == SAVE_AT and not resume:
            minloop.save_checkpoint(RUN, state, loader)
        for sink in sinks:
            for record in records:
                sink(record)
    minloop.shutdown_distributed()


def photograph():
    """TensorBoard's page, as a browser without a screen shows it."""
    from playwright.sync_api import sync_playwright

    port, query = 6007, urllib.parse.urlencode({"tagFilter": f"^({'|'.join(TAGS)})$", "smoothing": 0})
    board = [sys.executable, "-m", "tensorboard.main", "--logdir", str(RUN / "tensorboard"), "--port", str(port)]
    with subprocess.Popen(board) as server, sync_playwright() as playwright:
        try:
            time.sleep(20)  # until it serves and has read the files
            options = ["--no-sandbox", "--enable-unsafe-swiftshader", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=options)
            page = browser.new_page(viewport={"width": 1400, "height": 1030})
            page.goto(f"http://127.0.0.1:{port}/?{query}#timeseries")
            page.wait_for_timeout(15_000)
            page.get_by_role("button", name="Settings").last.click()  # closes that pane
            page.wait_for_timeout(5_000)
            page.screenshot(path=HERE / "tensorboard.png")
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    if "RANK" in os.environ:
        if os.environ["RANK"] == "0":
            shutil.rmtree(RUN, ignore_errors=True)
        train(KILLED_AT, resume=False)
        train(TRAIN_ITERS, resume=True)
    else:
        photograph()
