"""How many agents' sessions the data plane's gateway holds, and what another shard adds."""
