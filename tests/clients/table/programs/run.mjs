// Runs a program of a client in a folder of its own, with no input, within a time.
import { execFile } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const folder = () => mkdtempSync(join(tmpdir(), "client-"));
export const program = (name) => join(process.cwd(), "node_modules", ".bin", name);

export function run(name, words, { cwd, env = {}, seconds = 150 }) {
  // PWD too: some take it for the folder that they work in.
  const home = { HOME: cwd, PWD: cwd, XDG_CONFIG_HOME: join(cwd, ".config"), XDG_DATA_HOME: join(cwd, ".data") };
  const options = { cwd, env: { ...process.env, ...home, ...env }, timeout: seconds * 1000, killSignal: "SIGKILL", maxBuffer: 1 << 26 };
  return new Promise((resolve) => {
    const child = execFile(program(name), words, options, (error, stdout, stderr) =>
      resolve({ code: error ? (error.code ?? 1) : 0, out: stdout, all: stdout + stderr }));
    child.stdin.end();
  });
}
