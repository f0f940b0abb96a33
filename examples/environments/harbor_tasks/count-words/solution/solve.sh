#!/bin/bash
wc --words < /app/text.txt > /app/words.txt
