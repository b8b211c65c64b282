#!/bin/sh
# 1 for the sum, 0 for anything else.
if [ "$(cat total.txt)" = "$(cat /tests/total.txt)" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
