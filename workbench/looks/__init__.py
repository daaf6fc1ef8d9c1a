"""One question asked of one loaded model and one prompt; the answer is plain data: arrays, frames, strings, no figures."""
