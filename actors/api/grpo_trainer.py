"""`GRPOTrainer` with TRL's constructor and methods, on a run of actors.

`train()` starts `actors up` for everything but rewards. The reward actor is a thread of this process, and callbacks run
in the thread that calls `train()`, so that functions, lambdas and closures work as they are.
"""

import contextlib
import inspect
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors.api import caller
from actors.api.grpo_config import GRPOConfig
from actors.api.model_files import push, save_model
from actors.api.process import RunProcess
from actors.api.reward_here import RewardHere
from actors.api.rows import write_rows
from actors.api.translation import EVALUATED, Program, configuration, import_path, name_of, translated
from actors.callbacks.events import Best, Events, Told, saved_steps
from actors.callbacks.handler import Callbacks
from actors.callbacks.progress import TrainerState, evaluation_log
from actors.process.exits import EXIT_CONFIG
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig, load_config
from schemas.config.load import dump
from schemas.errors import ConfigError, PeerRefusedError, RunFailedError

POLL_SECONDS = 0.1
"""Pause between two looks at the run's files."""
STOP_SECONDS = 240.0
"""Longest time of an ordered stop; `actors up` kills its actors before."""
DATA, START_MODEL, FILE = "data", "start_model", "trainer.yaml"
"""Names in the run's folder: data sets, a model given as an object, the configuration."""
WORKER = "actors.environments.worker"


class TrainOutput(NamedTuple):
    """Result of `train()`, with transformers' names."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class GRPOTrainer:
    """Trainer with the constructor of TRL's GRPOTrainer.

    Args:
        model: name on the hub or folder; a model of transformers is saved below output_dir, with `processing_class`.
        reward_funcs: a function or several, of any kind; a text is the name of a reward model.
        args: a GRPOConfig of this package, or TRL's own.
        train_dataset: a `datasets.Dataset` or a list of dictionaries with a column `prompt`.
        eval_dataset: rows for evaluations, of the same kinds.
        processing_class: tokenizer; only read with a model given as an object.
        reward_processing_classes: must be None; a reward model brings its own.
        callbacks: objects or classes with methods of transformers' TrainerCallback.
        optimizers: must be (None, None); `optim` names the optimizer.
        quantization_config: configuration of bitsandbytes.
        peft_config: LoraConfig of peft.
        tools: functions that the model may call; another process imports them.
        rollout_func: must be None; `environment_factory` plays episodes.
        environment_factory: class of environments; another process imports it.

    Raises:
        ConfigError: an argument has no counterpart or a wrong value; each is named with the reason.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        self.args = GRPOConfig.of(args)
        _refuse(reward_processing_classes, rollout_func, optimizers)
        self._output = Path(self.args.output_dir).absolute()
        functions = [] if reward_funcs is None else reward_funcs
        functions = list(functions) if isinstance(functions, list | tuple) else [functions]
        wants_processes = bool(self.args.run_keys.get("up.reward"))
        rewards = [_model_of(one) if isinstance(one, str) else "" for one in functions]
        own = {index: one for index, one in enumerate(functions) if not isinstance(one, str)}
        for index, path in _paths_of(own, wants_processes).items():
            rewards[index] = path
        rows, num_rows = write_rows(train_dataset, self._output / DATA, "train_dataset")
        eval_rows = None
        if eval_dataset is not None:
            eval_rows, _ = write_rows(eval_dataset, self._output / DATA, "eval_dataset")
        environment = None
        if environment_factory is not None:
            _refuse_environments_of(own.values())
        if environment_factory is not None or tools:
            environment = self._environment(environment_factory, tools)
        self._program = Program(
            model=self._model(model, processing_class),
            rewards=rewards,
            arguments=self.args,
            rows=rows,
            num_rows=num_rows,
            eval_rows=eval_rows,
            peft_config=peft_config,
            quantization_config=quantization_config,
            environment=environment,
            is_tools=environment_factory is None,
        )
        self._tree, self.report = translated(self._program)
        """`report` has the fate of each keyword: taken, renamed, converted with the formula, or irrelevant."""
        self._config = configuration(self._tree)
        self.state = TrainerState(max_steps=self._config.trainer.max_steps * self._updates)
        self._callbacks = Callbacks(callbacks or [], self.args, self.state)
        self._callbacks.call("on_init_end")

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class to make one of."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or all of a class."""
        self._callbacks.remove(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train until the end of the run. A run that is in output_dir continues from its newest checkpoint.

        Ctrl-C finishes the groups under way, saves a checkpoint and raises KeyboardInterrupt; a second one kills the
        run at once. Calling `train()` again continues.

        Args:
            resume_from_checkpoint: None or True, or the folder of the newest checkpoint. False: a new run is wanted.

        Raises:
            ConfigError: the run can't start.
            RunFailedError: the run has failed, for example because of a reward function, which is the cause then.
        """
        self._check_resume(resume_from_checkpoint)
        started = time.monotonic()
        self._callbacks.control.should_training_stop = False
        first = max(saved_steps(self._output), default=0)
        self.state.global_step = first * self._updates
        self._callbacks.call("on_train_begin")
        self._run(self._tree, self._events(first))
        self._callbacks.call("on_train_end")
        if self._callbacks.ignored:
            wishes = ", ".join(sorted(self._callbacks.ignored))
            warnings.warn(
                f"callbacks asked for {wishes}; of their wishes only should_training_stop works", stacklevel=2
            )
        output = self._result(time.monotonic() - started, first)
        if self.args.push_to_hub:
            self.push_to_hub()
        return output

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluate the newest checkpoint, or the model as it was given before any training.

        Completions are sampled as in training, `num_generations_eval` of each row. A step is evaluated once: a second
        call returns the same numbers.

        Args:
            eval_dataset: rows instead of the trainer's own, as `GRPOTrainer(eval_dataset=…)`.
            ignore_keys: not used.
            metric_key_prefix: start of the names of the result.

        Raises:
            ConfigError: there are no rows, or this step was evaluated on other rows.
            RunFailedError: the evaluation has failed.
        """
        program = self._program
        if eval_dataset is not None:
            rows, _ = write_rows(eval_dataset, self._output / DATA, "eval_dataset")
            program = Program(**(vars(program) | {"eval_rows": rows}))
        if program.eval_rows is None:
            raise ConfigError("evaluate: there is no eval_dataset; pass one here or to GRPOTrainer")
        tree, _ = translated(program)
        step = max(saved_steps(self._output), default=0)
        done, mark = self._evaluation(step), self._output / DATA / f"evaluated-{step}.txt"
        if done and mark.is_file() and mark.read_text() != program.eval_rows.name:
            raise ConfigError(f"evaluate: step {step} was evaluated on other rows; a step is evaluated once")
        if not done:
            self._evaluate(tree, step)
            done = self._evaluation(step)
        if not done:
            raise RunFailedError(f"evaluate: the run has ended without a result for step {step}")
        mark.write_text(program.eval_rows.name)
        logs = evaluation_log(done, EVALUATED, metric_key_prefix)
        entry = logs | {"step": step * self._updates}
        if not any(one.items() >= entry.items() for one in self.state.log_history):
            self.state.log_history.append(entry)
            self._callbacks.call("on_evaluate", metrics=logs)
        return logs

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Copy model or adapter, configuration and tokenizer of the newest checkpoint; transformers and peft load them.

        Args:
            output_dir: folder; the run's own by default.
            _internal_call: not used.

        Raises:
            ConfigError: nothing has been saved yet.
        """
        save_model(self._output, Path(output_dir) if output_dir is not None else self._output)

    def push_to_hub(self, commit_message: str = "End of training", token: str | None = None, **_: Any) -> Any:
        """Upload what `save_model` copies to `hub_model_id`, or to a model with the name of output_dir.

        Args:
            commit_message: message of the commit.
            token: token of the hub; `hub_token`, or the one of `hf auth login`, by default.

        Raises:
            ConfigError: nothing has been saved yet.
        """
        name = self.args.hub_model_id or self._output.name
        private = self.args.hub_private_repo
        return push(self._output, name, commit_message, token=token or self.args.hub_token, private=private)

    # --- arguments -----------------------------------------------------------------------------------------------

    def _model(self, model: Any, tokenizer: Any) -> str:
        """Return the name or folder of a model; an object is saved once.

        Raises:
            ConfigError: the object has adapters already, or comes without a tokenizer.
        """
        if isinstance(model, str | os.PathLike):
            path = Path(model)
            return str(path.absolute()) if path.is_dir() else str(model)
        if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
            kind = type(model).__name__
            raise ConfigError(f"model: {kind} is no plain model of transformers; adapters are given as peft_config")
        if tokenizer is None:
            raise ConfigError("processing_class: a model given as an object needs its tokenizer")
        folder = self._output / START_MODEL
        # a run that continues has its model in checkpoints, and must not find another start
        if not saved_steps(self._output):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    def _environment(self, factory: Any, tools: Sequence[Any] | None) -> str:
        """Return the path of an environment, or of a file with a list of tools.

        Raises:
            ConfigError: another process can't import a class or function.
        """
        if isinstance(factory, Mapping):
            raise ConfigError("environment_factory: takes one class here; start a run.yaml with several environments")
        if factory is not None and tools:
            raise ConfigError("tools: an environment_factory has its tools as methods; leave one of the two out")
        targets = [factory] if factory is not None else list(tools or [])
        paths = []
        for target in targets:
            path = import_path(target)
            if path is None:
                key = "tools" if factory is None else "environment_factory"
                raise ConfigError(
                    f"{key}: {name_of(target)} runs in a worker process, which can't import it; define it at the top "
                    "level of a file"
                )
            paths.append(path)
        if factory is not None:
            return paths[0]
        text = "from actors.process.user_code import load_function\n\n"
        text += f"TOOLS = [load_function(path, 'tools') for path in {paths!r}]\n"
        file = self._output / DATA / "tools.py"
        file.write_text(text, encoding="utf-8")
        return f"{file}:TOOLS"

    def _check_resume(self, wanted: bool | str | None) -> None:
        """Refuse a start that the run in output_dir does not allow.

        Raises:
            ConfigError: a new run or an older checkpoint is wanted.
        """
        if any(name.startswith(WORKER) for name in sys.modules) and "__main__" in sys.modules:
            spec = getattr(sys.modules["__main__"], "__spec__", None)
            if spec is not None and spec.name.startswith(WORKER):
                raise ConfigError(
                    "train() is called while a worker imports this file for its environment; put it below "
                    'if __name__ == "__main__":'
                )
        steps = saved_steps(self._output)
        if wanted is False and steps:
            raise ConfigError(f"resume_from_checkpoint: {self._output} has a run; set another output_dir for a new one")
        if isinstance(wanted, str):
            name = Path(wanted).name
            if not steps or name != f"step_{steps[-1]}":
                newest = f"step_{steps[-1]}" if steps else "none"
                raise ConfigError(
                    f"resume_from_checkpoint: {wanted} is not the newest checkpoint ({newest}) of {self._output}; "
                    f"`actors rewind {self._output} --step N` goes back"
                )

    # --- the run -------------------------------------------------------------------------------------------------

    @property
    def _updates(self) -> int:
        """Optimizer updates of a step."""
        return self._config.trainer.num_minibatches * self._config.trainer.num_iterations

    def _events(self, first: int) -> Events:
        return Events(
            self._output,
            self.state,
            self._callbacks.call,
            updates=self._updates,
            epochs_per_step=self._config.packer.groups_per_step / self._program.num_rows,
            evaluated={EVALUATED: "eval"},
            told=Told.of_checkpoint(first),
            best=Best.of(self.args.metric_for_best_model, self.args.greater_is_better),
        )

    def _run(self, tree: Mapping[str, Any], events: Events | None, until: Callable[[], bool] = lambda: False) -> None:
        """Run the actors until the end of the run, a wish to stop, or until `until` is true.

        Raises:
            ConfigError: the configuration can't be used.
            RunFailedError: the run has failed.
            KeyboardInterrupt: the user has stopped the run.
        """
        config = self._write(tree)
        process = RunProcess(self._output / FILE, shows=not self.args.disable_tqdm)
        with _closing(process), RewardHere(config) as reward:
            interrupted, stopped, failure = False, False, None
            while process.running:
                try:
                    process.show()
                    if events is not None and failure is None:
                        events.follow()
                    if not stopped and (self._callbacks.control.should_training_stop or until() or reward.error):
                        stopped = True
                        process.stop()
                    time.sleep(POLL_SECONDS)
                except KeyboardInterrupt:
                    if interrupted:
                        process.kill()
                    interrupted = True
                    process.stop()
                    print("stopping; interrupt again to kill the run. train() continues it later", file=sys.stderr)
                except Exception as error:  # noqa: BLE001 - of a callback: raised again when the run has stopped
                    failure = failure or error
                    process.stop()
            code = process.close(STOP_SECONDS)
            if events is not None and failure is None:
                events.follow(is_over=True)
        if failure is not None:
            raise failure
        if interrupted:
            raise KeyboardInterrupt
        ended_well = code == 0 or (code == 128 + signal.SIGTERM and stopped)
        if not ended_well or process.unread or reward.error is not None:
            raise _failure_of(process, code, reward)

    def _write(self, tree: Mapping[str, Any]) -> RunConfig:
        """Write the configuration to a file; return it as the actors read it."""
        self._output.mkdir(parents=True, exist_ok=True)
        file = self._output / FILE
        # a notebook may have changed its folder since
        tree = {**tree, "output_dir": str(self._output)}
        file.write_text("".join(f"{name}: {dump(value)}\n" for name, value in tree.items()), encoding="utf-8")
        return load_config(file)

    def _evaluation(self, step: int) -> dict[str, Any] | None:
        path = self._output / "evals.jsonl"
        lines = read_lines(path) if path.is_file() else []
        found = [line for line in lines if line["version"] == step and EVALUATED in line["environments"]]
        return found[-1] if found else None

    def _evaluate(self, tree: dict[str, Any], step: int) -> None:
        """Run the actors for one evaluation: without training after a checkpoint, else until the first is there."""
        evaluation = tree["eval"] | {"at_start": step == 0, "at_end": step > 0, "every_steps": 0}
        tree = tree | {"eval": evaluation}
        if not step:
            self._run(tree, None, until=lambda: self._evaluation(0) is not None)
            return
        trainer = tree["trainer"] | {"max_steps": step}
        # else the run is done, and `actors up` has nothing to do
        (self._output / "summary.json").unlink(missing_ok=True)
        self._run(tree | {"trainer": trainer}, None)

    def _result(self, seconds: float, first: int) -> TrainOutput:
        """Return the result of a training, and add transformers' last entry to the history."""
        steps = [entry for entry in self.state.log_history if "loss" in entry]
        losses = [
            entry["loss"] for entry in steps if entry["step"] > first * self._updates and entry["loss"] is not None
        ]
        loss = sum(losses) / len(losses) if losses else 0.0
        completions = len(losses) * self._config.packer.groups_per_step * self._config.rollout.group_size
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": completions / seconds,
            "train_steps_per_second": len(losses) * self._updates / seconds,
            "train_loss": loss,
        }
        self.state.log_history.append(metrics | {"step": self.state.global_step, "epoch": self.state.epoch})
        return TrainOutput(self.state.global_step, loss, metrics)


@contextlib.contextmanager
def _closing(process: RunProcess) -> Iterator[None]:
    """Kill the process if the block is left before its end."""
    try:
        yield
    finally:
        if process.running:
            process.kill()
            process.close(STOP_SECONDS)


def _failure_of(process: RunProcess, code: int, reward: RewardHere) -> Exception:
    """Return the error of a run that has failed, with the exception of a reward function as its cause."""
    if isinstance(reward.error, ConfigError):
        return reward.error
    if reward.error is not None:
        # a packer that refuses tells the failure of the run, which mostly is that of a function
        is_told = isinstance(reward.error, PeerRefusedError)
        where = "" if is_told else "the reward actor in this process failed: "
        error: Exception = RunFailedError(f"{where}{reward.error}")
        error.__cause__ = (reward.raised if is_told else None) or reward.error
        return error
    lines = [line for line in process.failure if line.strip()] or [f"actors up ended with exit code {code}"]
    error = ConfigError(*lines) if code == EXIT_CONFIG else RunFailedError("\n".join(lines))
    error.__cause__ = reward.raised
    return error


def _refuse(reward_processing_classes: Any, rollout_func: Any, optimizers: Any) -> None:
    problems = []
    if reward_processing_classes is not None and reward_processing_classes != [None]:
        problems.append("reward_processing_classes: a reward model is loaded with its own tokenizer; leave it out")
    if rollout_func is not None:
        problems.append("rollout_func: has no counterpart; write a class with reset and step as environment_factory")
    if any(one is not None for one in optimizers):
        problems.append("optimizers: run in another process; set optim, learning_rate and lr_scheduler_type of args")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        problems.append(
            "WORLD_SIZE: start the script once; run_keys={'trainer.num_ranks': N} sets the trainer processes"
        )
    if problems:
        raise ConfigError(*problems)


def _refuse_environments_of(functions: Iterable[Any]) -> None:
    """Refuse reward functions that want the environments themselves.

    Raises:
        ConfigError: a function has an argument of this name.
    """
    for function in functions:
        try:
            wanted = inspect.signature(function).parameters
        except (TypeError, ValueError):
            # a function written in C has no signature
            continue
        if "environments" in wanted:
            raise ConfigError(
                f"reward_funcs: {name_of(function)} takes environments, which are in other processes here; return the "
                "reward from get_reward() of the class, or set its attribute `columns` to values for the function"
            )


def _model_of(name: str) -> str:
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _paths_of(functions: Mapping[int, Any], wants_processes: bool) -> dict[int, str]:
    """Return the path of each function: a name of this process, or of a module for further reward actors.

    Raises:
        ConfigError: an object is no function, or further reward actors could not import one.
    """
    problems, paths = [], {}
    for index, function in functions.items():
        if not callable(function) or hasattr(function, "forward"):
            kind = type(function).__name__
            problems.append(f"reward_funcs: {kind} is neither a function nor the name of a reward model")
        elif wants_processes and (path := import_path(function)) is not None:
            paths[index] = path
        elif wants_processes:
            name = name_of(function)
            problems.append(f"run_keys: up.reward starts processes, which can't import {name}; move it to a module")
    if problems:
        raise ConfigError(*problems)
    if wants_processes:
        return paths
    names = {index: name_of(function) for index, function in functions.items()}
    used = list(names.values())
    unique = {index: name if used.count(name) == 1 else f"{name}_{index}" for index, name in names.items()}
    places = caller.provide({unique[index]: function for index, function in functions.items()})
    return {index: places[name] for index, name in unique.items()}
