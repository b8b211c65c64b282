#!/bin/sh
# The share of the lines that are right.
touch sorted.txt
right=$(paste -d ' ' sorted.txt /tests/sorted.txt | awk '$1 == $2' | wc -l)
echo "{\"reward\": $(awk "BEGIN { print $right / 4 }"), \"lines\": $(wc -l <sorted.txt)}" >/logs/verifier/reward.json
