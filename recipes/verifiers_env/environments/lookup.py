"""Prices are looked up with a tool, which the environment serves over MCP, and added."""

import random

import verifiers.v1 as vf

PRICES = {"tea": 3, "bread": 4, "milk": 2, "rice": 5}


class PriceTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def price(self, item: str) -> str:
        """The price of an item."""
        return str(PRICES.get(item, "unknown"))


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupConfig(vf.TasksetConfig):
    count: int = 256
    seed: int = 0
    task: LookupTaskConfig = LookupTaskConfig()


class Basket(vf.TaskData):
    total: int


class LookupTask(vf.Task[Basket, vf.State, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[vf.Toolset]:
        return [PriceTools(config.tools)]

    @vf.reward
    async def added(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in (trace.last_reply or ""))

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            pair = draw.sample(sorted(PRICES), 2)
            prompt = f"What do {pair[0]} and {pair[1]} cost together?"
            yield LookupTask(Basket(prompt=prompt, total=sum(PRICES[item] for item in pair)), self.config.task)


__all__ = ["LookupTaskset"]

if __name__ == "__main__":
    PriceTools.run()  # verifiers starts the tool's server as `python -m lookup`
