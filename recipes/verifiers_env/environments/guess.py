"""A number from 1 to 9 is guessed in at most four turns; the environment plays the user, who says more or less."""

import random
import re

import verifiers.v1 as vf

TURNS = 4


class GuessConfig(vf.TasksetConfig):
    count: int = 256
    seed: int = 0


class Secret(vf.TaskData):
    number: int


class GuessTask(vf.Task[Secret, vf.State, vf.TaskConfig]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as game:
            segment, turns, off = await game.turn(), 1, None
            while not segment.terminated:
                found = re.search("[1-9]", segment.last_reply or "")
                off = None if found is None else task.data.number - int(found[0])
                if off == 0 or turns == TURNS:
                    break
                hint = "a digit, please" if off is None else "more" if off > 0 else "less"
                segment, turns = await game.turn(hint), turns + 1
        game.trace.record_reward("guessed", 1 - 0.2 * (turns - 1) if off == 0 else 0.1 * (off is not None), 1.0)


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            yield GuessTask(Secret(prompt="guess 1-9", number=draw.randint(1, 9)), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
