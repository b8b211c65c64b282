#!/bin/sh
# 1 for the word, 0 for anything else.
if [ "$(cat hello.txt)" = hello ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
