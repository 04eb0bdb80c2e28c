// Starts `planc lsp` for the plans of a workspace. The server does all the work.
const { workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

exports.activate = () => {
  const [command, ...args] = workspace.getConfiguration("planc").get("command");
  client = new LanguageClient(
    "planc",
    "planc",
    { command, args },
    { documentSelector: [{ language: "plan" }] },
  );
  return client.start();
};

exports.deactivate = () => client && client.stop();
